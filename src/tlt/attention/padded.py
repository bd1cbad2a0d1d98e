"""Attention plans for CUDA graphs: their shapes do not depend on lengths, and the device computes them without the
host.

Shapes: B rows with padding, N nodes a row, T positions, K key-value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt.attention.slots import RowSpan, SlotAttention, SlotPlan


def padded_plan(slots: SlotAttention, lengths: Tensor, tokens: int, visible: Tensor | None, depths: Tensor) -> SlotPlan:
    """Return the plan of a target pass over slots [0, B), as `SlotAttention.plan` does.

    Rows with a length of -1 in `lengths` [B] are padding: their keys and values are not kept, and their output is not
    used. Every row attends over `tokens` positions. The mask hides those that a row does not have."""
    rows, new = depths.shape
    committed = lengths.clamp(min=0)[:, None]
    order = torch.arange(max(rows, new, tokens), device=depths.device)
    row = order[:rows].masked_fill(lengths < 0, -1).repeat_interleave(new)
    places = _places(slots, row, (committed + order[:new]).flatten())
    bias = slots.by_query(slots.bias(order[:tokens] - committed, visible, new))
    return SlotPlan(0, 0, new, places, [RowSpan(0, rows, tokens)], [bias], None, committed + depths, {})


def level_plan(slots: SlotAttention, rows: Tensor, positions: Tensor, seen: Tensor) -> SlotPlan:
    """Return the plan of a level of draft chains, one node a row, which writes M entries: `rows` [M], where -1 is
    padding that is not kept, and `positions` [M]. `seen` [B * K, 1, T] is the mask of what each row attends to."""
    span = RowSpan(0, len(seen) // slots.shape.num_kv_heads, slots.tokens)
    return SlotPlan(0, 0, 1, _places(slots, rows, positions), [span], [seen], None)


def _places(slots: SlotAttention, rows: Tensor, positions: Tensor) -> Tensor:
    """Return where the keys of M entries lie, then their values, [2 * M * K]. Padding goes to the last spare entry."""
    heads, values = torch.arange(slots.shape.num_kv_heads, device=rows.device), slots.memory[0].shape[1]
    first = (rows[:, None] * len(heads) + heads) * slots.tokens
    keys = (first + (positions % slots.tokens)[:, None]).masked_fill(rows[:, None] < 0, values - 1).flatten()
    return torch.cat([keys, keys + values])
