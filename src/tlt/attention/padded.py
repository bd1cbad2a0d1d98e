"""Attention plans for CUDA graphs. Their shapes do not depend on the rows' lengths, and their values are computed on
the device.

Shapes: B rows, padding included, N new tokens per row, T positions, K key-value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt.attention.slots import RowSpan, SlotAttention, SlotPlan


def padded_plan(slots: SlotAttention, lengths: Tensor, tokens: int, new: int) -> SlotPlan:
    """Return the plan of a target pass over slots [0, B), like `SlotAttention.plan`, for a CUDA graph.

    `lengths` [B] are the committed lengths. A row with length -1 is padding: its keys and values are not kept, and its
    output is not used. Every row attends over `tokens` positions. The mask hides positions that a row does not have."""
    rows, committed = len(lengths), lengths.clamp(min=0)[:, None]
    order = torch.arange(max(rows, new, tokens), device=lengths.device)
    row = order[:rows].masked_fill(lengths < 0, -1).repeat_interleave(new)
    positions = committed + order[:new]
    bias = slots.bias(order[:tokens] - committed, new)
    places = _places(slots, row, positions.flatten())
    return SlotPlan(0, 0, new, places, [RowSpan(0, rows, tokens)], [bias], {}, None, positions)


def level_plan(slots: SlotAttention, rows: Tensor, positions: Tensor, seen: Tensor) -> SlotPlan:
    """Return the plan of one pass of a draft, with one token per row, for a CUDA graph.

    The pass writes M cache entries: position `positions[m]` of row `rows[m]`. A row of -1 is padding, which is not
    kept. `seen` [B * K, 1, T] is the attention bias: 0 where a row attends, -inf elsewhere."""
    span = RowSpan(0, len(seen) // slots.shape.num_kv_heads, slots.tokens)
    return SlotPlan(0, 0, 1, _places(slots, rows, positions), [span], [seen], {}, None)


def _places(slots: SlotAttention, rows: Tensor, positions: Tensor) -> Tensor:
    """Return the flat memory indices [2 * M * K] of M cache entries: first of their keys, then of their values. Padding
    goes to the last spare entry."""
    heads, values = torch.arange(slots.shape.num_kv_heads, device=rows.device), slots.memory[0].shape[1]
    first = (rows[:, None] * len(heads) + heads) * slots.tokens
    keys = (first + (positions % slots.tokens)[:, None]).masked_fill(rows[:, None] < 0, values - 1).flatten()
    return torch.cat([keys, keys + values])
