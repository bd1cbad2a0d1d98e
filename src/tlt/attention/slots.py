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
    """what `deeper` goes on from, in windowed plans"""


class _Ahead(NamedTuple):
    committed: Tensor
    """[B]"""
    slot_places: Tensor
    """[B, 1, K] where each slot's heads begin"""
    beyond: Tensor
    """[B, T] how far each index is behind the committed positions: 0 at the first new node, negative before"""
    wraps: bool
    """whether some row may come to the end of its ring"""
    seen: Tensor | None
    """[B * K, N, T] the bias of the nodes of the last pass; None while there are chains that see everything"""


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
            spans, most = [Span(0, rows, min(self.tokens, longest + new))], self.tokens
        beyond = self._beyond(committed, most, starts)
        slot_places = torch.arange(first * heads, (first + rows) * heads, device=device).view(rows, 1, heads)
        slot_places = slot_places * self.tokens
        if written is not None:
            places = slot_places[written.rows, 0] + (written.positions % self.tokens)[:, None]
        else:
            places = slot_places + self._indices(committed, 0, new)[..., None]
        ahead, biases = None, []
        if starts is not None:
            assert new == 1, "windowed passes begin at the last committed token"
            wraps = any(length % self.tokens + new + _AHEAD > self.tokens for length in lengths)
            all_seen = min(lengths) == longest and max(starts) == 0
            seen = None if all_seen else self._bias(beyond, None, new).contiguous()  # `deeper` writes to it
            ahead = _Ahead(committed, slot_places, beyond, wraps, seen)
            biases = [None if seen is None else seen[..., : spans[0].tokens]]
        for span in spans[len(biases) :]:
            rows_of = slice(span.low, span.high)
            biases.append(
                self._bias(beyond[rows_of, : span.tokens], None if visible is None else visible[rows_of], new)
            )
        return SlotPlan(first, 0, new, self._both(places), spans, biases, ahead)

    def deeper(self, plan: SlotPlan, new: int, parents: Tensor | None = None) -> SlotPlan:
        ahead, old, heads = plan.ahead, plan.old + plan.nodes, self.shape.num_kv_heads
        assert ahead is not None, "a windowed plan"
        assert old + new <= 1 + _AHEAD, "a plan has room for so many nodes"
        (span,) = plan.spans
        span = span._replace(tokens=min(self.tokens, span.tokens + new))
        chain = new == plan.nodes == 1
        indices = None
        if chain and plan.old > 0 and not ahead.wraps:
            places = plan.places + 1
        else:
            indices = self._indices(ahead.committed, old, new)
            places = self._both(ahead.slot_places + indices[..., None])
        seen = ahead.seen
        if chain and seen is not None:  # the pass before is over: its bias becomes this one's
            of_keys = places[: len(seen)] - plan.first * heads * self.tokens
            seen.view(-1).index_fill_(0, of_keys, 0.0)
        elif not chain:
            assert parents is not None, "where there are branches, each has a parent"
            assert indices is not None, "computed just above"
            before = self._bias(ahead.beyond - (old - 1), None, 1) if seen is None else seen
            of_parent = parents.repeat_interleave(heads, dim=0)[..., None].expand(-1, -1, before.shape[-1])
            seen = before.gather(1, of_parent)
            seen.scatter_(2, indices.repeat_interleave(heads, dim=0)[..., None], 0.0)
        bias = None if seen is None else self._by_query(seen[..., : span.tokens])
        return SlotPlan(plan.first, old, new, places, [span], [bias], ahead._replace(seen=seen))

    def _beyond(self, committed: Tensor, tokens: int, starts: Sequence[int] | None) -> Tensor:
        index = torch.arange(tokens, device=committed.device)
        if starts is None or max(starts) == 0:
            return index - committed[:, None]
        start = torch.tensor(starts, device=committed.device)[:, None]
        # the first position seen, and from there around the ring
        return (index - start) % self.tokens + (start - committed[:, None])

    def _indices(self, committed: Tensor, old: int, new: int) -> Tensor:
        """[B, N] of new nodes in their slots."""
        return (committed[:, None] + torch.arange(old, old + new, device=committed.device)) % self.tokens

    def _both(self, places: Tensor) -> Tensor:
        """Of keys, and then of their values."""
        places = places.view(-1)
        return torch.cat([places, places + self.slots * self.shape.num_kv_heads * self.tokens])

    def _bias(self, beyond: Tensor, visible: Tensor | None, new: int) -> Tensor:
        """[rows * K, 1 or H/K * N, T], of nodes that stand right behind the committed positions."""
        if visible is None:
            hidden = beyond[:, None] > torch.arange(new, device=beyond.device)[:, None]
        else:
            which = beyond.clamp(0, new - 1)[:, None].expand(-1, new, -1)
            hidden = (beyond >= 0)[:, None] & ~(visible.gather(2, which) & (beyond < new)[:, None])
        bias = torch.where(hidden, self._hidden, self._seen)
        rows, _, T = bias.shape
        by_head = bias[:, None].expand(rows, self.shape.num_kv_heads, new, T).reshape(-1, new, T)
        return self._by_query(by_head)

    def _by_query(self, bias: Tensor) -> Tensor:
        """[rows * K, N, T] -> a row for each query that shares the key-value head; one for all of them if N is 1."""
        rows, N, T = bias.shape
        if N == 1 or self.queries_per_kv == 1:
            return bias
        return bias[:, None].expand(rows, self.queries_per_kv, N, T).reshape(rows, -1, T)

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
