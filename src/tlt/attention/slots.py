"""Attention over contiguous slots: position p of a sequence lies at index p of its slot, modulo the slot's size.

The target's slots are as long as its longest row, so that nothing wraps. The learned drafter attends to a window, and
its slots are rings a little longer than that. Which of a pass's nodes see each other is the tree's business. Rows of
very different lengths are attended in several spans, each padded to its own longest row, because on a CPU the time goes
into reading keys and values.
Shapes: R slots, B rows of a pass, N new nodes a row, T tokens, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.attention.backend import Entries, HeadShape

_SPAN_COST = 1024  # an extra span costs about as much time as attending this many tokens of one row
_AHEAD = 64  # nodes that `deeper` passes may add to a windowed plan


class Span(NamedTuple):
    """Rows [low, high) of a pass, attended together over the first `tokens` indices of their slots."""

    low: int
    high: int
    tokens: int


@dataclass(frozen=True)
class SlotPlan:
    """Where the keys and values of a pass go, and what its nodes see; built once a pass, used by every layer."""

    first: int
    old: int
    """nodes of each row that earlier passes of the same plan left behind the committed positions"""
    nodes: int
    """N"""
    places: Tensor
    """index of each key and value to write, among all (slot, head, index)"""
    spans: list[Span]
    biases: list[Tensor]
    """for each span [rows * K, 1 or H/K * N, T]: 0 where visible, -inf elsewhere"""
    committed: Tensor
    """[B]"""
    slot_places: Tensor
    """[B, 1, K] where each slot's heads begin"""
    beyond: Tensor
    """[B, T] how far each index is behind the committed positions: 0 at the first new node, negative before"""


class SlotAttention:
    """Keys and values of R slots of T tokens, per layer, each [R, K, T, E]."""

    def __init__(self, shape: HeadShape) -> None:
        self.shape = shape
        self.queries_per_kv = shape.num_heads // shape.num_kv_heads
        self.keys = [self._empty(0, 0) for _ in range(shape.num_layers)]
        self.values = [self._empty(0, 0) for _ in range(shape.num_layers)]
        self._seen = torch.zeros((), dtype=shape.dtype, device=shape.device)
        self._hidden = torch.full((), -torch.inf, dtype=shape.dtype, device=shape.device)

    def _empty(self, slots: int, tokens: int) -> Tensor:
        s = self.shape
        # zeros: a masked index has weight 0, and 0 * NaN of uninitialised memory would be NaN
        return torch.zeros(slots, s.num_kv_heads, tokens, s.head_dim, dtype=s.dtype, device=s.device)

    @property
    def slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[2]

    def resize(self, slots: int, tokens: int) -> None:
        """Re-allocates tensor by tensor, so that the peak is one of them above the sum."""
        r, t = min(slots, self.slots), min(tokens, self.tokens)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._empty(slots, tokens)
                tensors[layer][:r, :, :t] = old[:r, :, :t]

    def copy(self, source: int, target: int, length: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def move(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[slots, :, targets] = tensor[slots, :, sources]

    def wipe(self, slot: int, start: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[slot, :, start:] = 0

    # -- plans ---------------------------------------------------------------------------------------------------------

    def plan(
        self,
        first: int,
        lengths: Sequence[int],
        new: int,
        visible: Tensor | None = None,
        starts: Sequence[int] | None = None,
        written: Entries | None = None,
    ) -> SlotPlan:
        device, heads, rows, longest = self.shape.device, self.shape.num_kv_heads, len(lengths), max(lengths)
        assert longest + new <= self.tokens or starts is not None, "the cache makes room before a pass"
        committed = torch.tensor(lengths, device=device)
        if starts is None:
            spans, ahead = _spans(lengths, new), new
        else:  # of one length, about: one span
            spans, ahead = [Span(0, rows, min(self.tokens, longest + new))], new + _AHEAD
        beyond = self._beyond(committed, min(self.tokens, longest + ahead), starts)
        slot_places = torch.arange(first * heads, (first + rows) * heads, device=device).view(rows, 1, heads)
        slot_places = slot_places * self.tokens
        if written is not None:
            places = slot_places[written.rows, 0] + (written.positions % self.tokens)[:, None]
        else:
            places = self._places(slot_places, committed, 0, new)
        biases = [self._bias(span, beyond, visible, 0, new) for span in spans]
        return SlotPlan(first, 0, new, places.view(-1), spans, biases, committed, slot_places, beyond)

    def deeper(self, plan: SlotPlan, new: int, visible: Tensor | None = None) -> SlotPlan:
        old = plan.old + plan.nodes
        (before,) = plan.spans
        span = before._replace(tokens=min(self.tokens, before.tokens + new))
        assert span.tokens <= plan.beyond.shape[1], "a plan has room for so many nodes"
        places = self._places(plan.slot_places, plan.committed, old, new)
        bias = self._bias(span, plan.beyond, visible, old, new)
        return replace(plan, old=old, nodes=new, places=places.view(-1), spans=[span], biases=[bias])

    def _beyond(self, committed: Tensor, tokens: int, starts: Sequence[int] | None) -> Tensor:
        index = torch.arange(tokens, device=committed.device)
        if starts is None or max(starts) == 0:
            return index - committed[:, None]
        start = torch.tensor(starts, device=committed.device)[:, None]
        # the first position seen, and from there around the ring
        return (index - start) % self.tokens + (start - committed[:, None])

    def _places(self, slot_places: Tensor, committed: Tensor, old: int, new: int) -> Tensor:
        """[B, N, K] of new nodes."""
        nodes = torch.arange(old, old + new, device=committed.device)
        return slot_places + ((committed[:, None] + nodes) % self.tokens)[..., None]

    def _bias(self, span: Span, beyond: Tensor, visible: Tensor | None, old: int, new: int) -> Tensor:
        rows, T = slice(span.low, span.high), span.tokens
        beyond = beyond[rows, :T]
        if visible is None:
            hidden = beyond[:, None] > torch.arange(old, old + new, device=beyond.device)[:, None]
        else:
            which = beyond.clamp(0, old + new - 1)[:, None].expand(-1, new, T)
            hidden = (beyond >= 0)[:, None] & ~(visible[rows].gather(2, which) & (beyond < old + new)[:, None])
        bias = torch.where(hidden, self._hidden, self._seen)
        heads, share = self.shape.num_kv_heads, self.queries_per_kv if new > 1 else 1
        return bias[:, None, None].expand(-1, heads, share, -1, -1).reshape(-1, share * new, T)

    # -- attention -----------------------------------------------------------------------------------------------------

    def attend(self, plan: SlotPlan, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values, size = self.keys[layer], self.values[layer], self.shape.head_dim
        keys.view(-1, size).index_copy_(0, plan.places, key.reshape(-1, size))
        values.view(-1, size).index_copy_(0, plan.places, value.reshape(-1, size))
        # the queries that share a key-value head become the rows of one matmul: keys are never repeated
        if plan.nodes > 1:
            query = query.view(-1, plan.nodes, self.shape.num_kv_heads, self.queries_per_kv, size)
            query = query.permute(0, 2, 3, 1, 4)
        folded = query.reshape(-1, self.queries_per_kv * plan.nodes, size)
        parts = [
            self._attend_span(folded, keys, values, plan.first, span, bias)
            for span, bias in zip(plan.spans, plan.biases, strict=True)
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        if plan.nodes > 1:
            mixed = mixed.view(-1, self.shape.num_kv_heads, self.queries_per_kv, plan.nodes, size)
            mixed = mixed.permute(0, 3, 1, 2, 4)
        return mixed.reshape(-1, self.shape.num_heads * size)

    def _attend_span(self, query: Tensor, keys: Tensor, values: Tensor, first: int, span: Span, bias: Tensor) -> Tensor:
        """query [B * K, H/K * N, E] -> the span's rows of the same."""
        slots = slice(first + span.low, first + span.high)
        query = query.narrow(0, span.low * self.shape.num_kv_heads, len(bias))
        seen_keys, seen_values = (x[slots, :, : span.tokens].flatten(0, 1) for x in (keys, values))
        scores = torch.baddbmm(bias, query, seen_keys.transpose(1, 2), alpha=self.shape.head_dim**-0.5)
        wide = torch.float32 if self.shape.dtype == torch.bfloat16 else None
        return torch.bmm(torch.softmax(scores, dim=-1, dtype=wide).to(self.shape.dtype), seen_values)


def _spans(lengths: Sequence[int], new: int) -> list[Span]:
    """Cut the rows, in their order, where padding each part to its own longest row saves more than a span costs."""

    def cut(low: int, high: int) -> list[Span]:
        whole = max(lengths[low:high])
        longest_from = list(lengths[low:high])
        for i in range(high - low - 2, -1, -1):
            longest_from[i] = max(longest_from[i], longest_from[i + 1])
        best, at, longest_so_far = 0, 0, 0
        for i in range(1, high - low):
            longest_so_far = max(longest_so_far, lengths[low + i - 1])
            saved = i * (whole - longest_so_far) + (high - low - i) * (whole - longest_from[i])
            if saved > best:
                best, at = saved, low + i
        return cut(low, at) + cut(at, high) if best > _SPAN_COST else [Span(low, high, whole + new)]

    return cut(0, len(lengths))
