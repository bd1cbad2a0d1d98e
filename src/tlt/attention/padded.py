"""Plans over slots whose shapes depend on no length, and which the device makes alone: passes by them can be captured.

Shapes: B rows with padding, N nodes a row, T positions, K key-value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt.attention.slots import SlotAttention, SlotPlan, Span


def padded_plan(slots: SlotAttention, lengths: Tensor, tokens: int, visible: Tensor | None, depths: Tensor) -> SlotPlan:
    """Return the plan of a target pass over slots [0, B), as `SlotAttention.plan` does.

    Rows with a length of -1 in `lengths` [B] are padding: their keys and values are not kept, and their attention means
    nothing. Every row attends over `tokens` positions, of which the mask hides those that it lacks."""
    heads, (rows, new) = slots.shape.num_kv_heads, depths.shape
    committed = lengths.clamp(min=0)[:, None]
    order = torch.arange(max(rows * heads, new, tokens), device=depths.device)
    first = (order[: rows * heads] * slots.tokens).view(rows, 1, heads)
    places = first + (committed + order[:new])[..., None]
    values = slots.memory[0].shape[1]
    places = places.masked_fill(lengths[:, None, None] < 0, values - 1).flatten()  # the last spare entry
    bias = slots.by_query(slots.bias(order[:tokens] - committed, visible, new))
    span, positions = Span(0, rows, tokens), committed + depths
    return SlotPlan(0, 0, new, torch.cat([places, places + values]), [span], [bias], None, positions, {})


def place_of(slots: SlotAttention, rows: Tensor, positions: Tensor) -> Tensor:
    """Return where the keys of M entries lie in a ring, [M * K]. A row of -1 is padding, which is not kept."""
    heads = torch.arange(slots.shape.num_kv_heads, device=rows.device)
    first = (rows[:, None] * len(heads) + heads) * slots.tokens
    places = first + (positions % slots.tokens)[:, None]
    return places.masked_fill(rows[:, None] < 0, slots.memory[0].shape[1] - 1).flatten()  # the last spare entry


def level_plan(slots: SlotAttention, places: Tensor, rows: int, seen: Tensor) -> SlotPlan:
    """Return the plan of a level of draft chains, one node a row, which writes to `places` [M * K]. `seen` [B * K, 1,
    T] is the mask of what each row attends to."""
    both = torch.cat([places, places + slots.memory[0].shape[1]])
    return SlotPlan(0, 0, 1, both, [Span(0, rows, slots.tokens)], [seen], None)
