"""Attention over contiguous slots: position p of a sequence lies at index p of its slot, modulo the slot's size.

The target's slots are as long as its longest row, so that nothing wraps. The learned drafter attends to a window, and
its slots are rings a little longer than that. Which of a pass's nodes see each other is the tree's business. Rows of
very different lengths are attended in several spans, each padded to its own longest row, because on a CPU the time goes
into reading keys and values.
Shapes: R slots, B rows of a pass, N new nodes a row, T tokens, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.attention.backend import Entries, HeadShape

_SPAN_COST = 1024  # an extra span costs about as much time as attending this many tokens of one row
_AHEAD = 64  # nodes that `deeper` passes may add to a windowed plan; then its ring must have room for as many


class Span(NamedTuple):
    """Rows [low, high) of a pass, attended together over the first `tokens` indices of their slots."""

    low: int
    high: int
    tokens: int


class SlotPlan(NamedTuple):
    """Where the keys and values of a pass go, and what its nodes see; built once a pass, used by every layer."""

    first: int
    old: int
    """nodes of each row that earlier passes of the same plan left behind the committed positions"""
    nodes: int
    """N"""
    places: Tensor
    """of each key and then of each value to write, its index among all (key or value, slot, head, index)"""
    spans: list[Span]
    biases: list[Tensor | None]
    """for each span [rows * K, 1 or H/K * N, T]: 0 where visible, -inf elsewhere; None: all is visible"""
    ahead: _Ahead | None
    """what `deeper` goes on from; None for a pass over several spans"""


class _Ahead(NamedTuple):
    committed: Tensor
    """[B]"""
    slot_places: Tensor
    """[B, 1, K] where each slot's heads begin"""
    beyond: Tensor
    """[B, T] how far each index is behind the committed positions: 0 at the first new node, negative before"""
    by_head: Tensor | None
    """the same [B * K, 1, T]; None where chains see all of it up to their last node"""
    wraps: bool
    """whether some row may come to the end of its ring"""


class SlotAttention:
    """Keys and values of R slots of T tokens, per layer [2, R, K, T, E]."""

    def __init__(self, shape: HeadShape) -> None:
        self.shape = shape
        self.queries_per_kv = shape.num_heads // shape.num_kv_heads
        self.layers = [self._empty(0, 0) for _ in range(shape.num_layers)]
        self._seen = torch.zeros((), dtype=shape.dtype, device=shape.device)
        self._hidden = torch.full((), -torch.inf, dtype=shape.dtype, device=shape.device)

    def _empty(self, slots: int, tokens: int) -> Tensor:
        s = self.shape
        # zeros: a masked index has weight 0, and 0 * NaN of uninitialised memory would be NaN
        return torch.zeros(2, slots, s.num_kv_heads, tokens, s.head_dim, dtype=s.dtype, device=s.device)

    @property
    def slots(self) -> int:
        return self.layers[0].shape[1]

    @property
    def tokens(self) -> int:
        return self.layers[0].shape[3]

    def resize(self, slots: int, tokens: int) -> None:
        """Re-allocates layer by layer, so that the peak is one of them above the sum."""
        r, t = min(slots, self.slots), min(tokens, self.tokens)
        for layer, old in enumerate(self.layers):
            self.layers[layer] = self._empty(slots, tokens)
            self.layers[layer][:, :r, :, :t] = old[:, :r, :, :t]

    def copy(self, source: int, target: int, length: int) -> None:
        for tensor in self.layers:
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def move(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
        for tensor in self.layers:
            tensor[:, slots, :, targets] = tensor[:, slots, :, sources]

    def wipe(self, slot: int, start: int) -> None:
        for tensor in self.layers:
            tensor[:, slot, :, start:] = 0

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
            spans, most = _spans(lengths, new), longest + new
        else:  # all about as long as the window: one span
            most = min(self.tokens, longest + new + _AHEAD)
            spans = [Span(0, rows, min(self.tokens, longest + new))]
        beyond = self._beyond(committed, most, starts)
        slot_places = torch.arange(first * heads, (first + rows) * heads, device=device).view(rows, 1, heads)
        slot_places = slot_places * self.tokens
        if written is not None:
            places = slot_places[written.rows, 0] + (written.positions % self.tokens)[:, None]
        else:
            places = self._places(slot_places, committed, 0, new)
        ahead = by_head = None
        if len(spans) == 1:
            if visible is not None or min(lengths) < longest or max(starts or (0,)) > 0:
                by_head = beyond[:, None].expand(rows, heads, most).reshape(rows * heads, 1, most)
            ahead = _Ahead(
                committed, slot_places, beyond, by_head, any(n % self.tokens + _AHEAD >= self.tokens for n in lengths)
            )
        biases = [self._bias(span, beyond, by_head, visible, 0, new) for span in spans]
        return SlotPlan(first, 0, new, self._both(places), spans, biases, ahead)

    def deeper(self, plan: SlotPlan, new: int, visible: Tensor | None = None) -> SlotPlan:
        ahead, old = plan.ahead, plan.old + plan.nodes
        assert ahead is not None, "a plan of one span"
        (before,) = plan.spans
        span = before._replace(tokens=min(self.tokens, before.tokens + new))
        assert span.tokens <= ahead.beyond.shape[1], "a plan has room for so many nodes"
        if new == plan.nodes == 1 and plan.old > 0 and not ahead.wraps:
            places = plan.places + 1
        else:
            places = self._both(self._places(ahead.slot_places, ahead.committed, old, new))
        bias = self._bias(span, ahead.beyond, ahead.by_head, visible, old, new)
        return SlotPlan(plan.first, old, new, places, [span], [bias], ahead)

    def _beyond(self, committed: Tensor, tokens: int, starts: Sequence[int] | None) -> Tensor:
        index = torch.arange(tokens, device=committed.device)
        if starts is None or max(starts) == 0:
            return index - committed[:, None]
        start = torch.tensor(starts, device=committed.device)[:, None]
        # the first position seen, and from there around the ring
        return (index - start) % self.tokens + (start - committed[:, None])

    def _places(self, slot_places: Tensor, committed: Tensor, old: int, new: int) -> Tensor:
        """[B, N, K] of the keys of new nodes."""
        nodes = torch.arange(old, old + new, device=committed.device)
        return slot_places + ((committed[:, None] + nodes) % self.tokens)[..., None]

    def _both(self, places: Tensor) -> Tensor:
        """Of keys, and then of their values."""
        places = places.view(-1)
        return torch.cat([places, places + self.slots * self.shape.num_kv_heads * self.tokens])

    def _bias(
        self, span: Span, beyond: Tensor, by_head: Tensor | None, visible: Tensor | None, old: int, new: int
    ) -> Tensor | None:
        rows, T, heads = slice(span.low, span.high), span.tokens, self.shape.num_kv_heads
        if visible is None and new == 1 and by_head is not None:
            return torch.where(by_head[:, :, :T] > old, self._hidden, self._seen)
        if visible is None and new == 1 and len(beyond) == span.high - span.low:
            return None
        beyond = beyond[rows, :T]
        if visible is None:
            hidden = beyond[:, None] > torch.arange(old, old + new, device=beyond.device)[:, None]
        else:
            which = beyond.clamp(0, old + new - 1)[:, None].expand(-1, new, T)
            hidden = (beyond >= 0)[:, None] & ~(visible[rows].gather(2, which) & (beyond < old + new)[:, None])
        bias = torch.where(hidden, self._hidden, self._seen)
        share = self.queries_per_kv if new > 1 else 1
        return bias[:, None, None].expand(-1, heads, share, -1, -1).reshape(-1, share * new, T)

    # -- attention -----------------------------------------------------------------------------------------------------

    def attend(self, plan: SlotPlan, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        both, size = self.layers[layer], self.shape.head_dim
        both.view(-1, size).index_copy_(0, plan.places, torch.cat([key, value]).view(-1, size))
        # the queries that share a key-value head become the rows of one matmul: keys are never repeated
        if plan.nodes > 1:
            query = query.view(-1, plan.nodes, self.shape.num_kv_heads, self.queries_per_kv, size)
            query = query.permute(0, 2, 3, 1, 4)
        folded = query.reshape(-1, self.queries_per_kv * plan.nodes, size)
        parts = [
            self._attend_span(folded, both, plan.first, span, bias)
            for span, bias in zip(plan.spans, plan.biases, strict=True)
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        if plan.nodes > 1:
            mixed = mixed.view(-1, self.shape.num_kv_heads, self.queries_per_kv, plan.nodes, size)
            mixed = mixed.permute(0, 3, 1, 2, 4)
        return mixed.reshape(-1, self.shape.num_heads * size)

    def _attend_span(self, query: Tensor, both: Tensor, first: int, span: Span, bias: Tensor | None) -> Tensor:
        """query [B * K, H/K * N, E] -> the span's rows of the same."""
        heads, rows = self.shape.num_kv_heads, span.high - span.low
        if rows * heads < len(query):
            query = query.narrow(0, span.low * heads, rows * heads)
        keys, values = both[:, first + span.low : first + span.high, :, : span.tokens].flatten(1, 2)
        scale, beta = self.shape.head_dim**-0.5, 0 if bias is None else 1
        scores = torch.baddbmm(self._seen if bias is None else bias, query, keys.mT, alpha=scale, beta=beta)
        wide = torch.float32 if self.shape.dtype == torch.bfloat16 else None
        return torch.bmm(torch.softmax(scores, dim=-1, dtype=wide).to(self.shape.dtype), values)


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
