"""Attention over contiguous slots. Position p of a sequence is stored at index p of its slot, modulo the slot's
capacity.

The target's slots are as long as its longest row, so they never wrap. The learned drafter attends to a window of
tokens, and its slots are ring buffers slightly longer than the window. Rows of very different lengths are divided into
several spans, and each span is padded to its own longest row. This is faster, because a CPU spends most of the time on
reading keys and values.

Shapes: R slots, B rows in a pass, N new tokens per row, T tokens per slot, H query heads, K key-value heads, E head
size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.attention.key_counts import QUERIES, full_queries, rounded_up
from tlt.attention.slot_memory import Entries, HeadShape, SlotMemory
from tlt.sampling import has_kernel
from tlt.types import MAX_DRAFT_TOKENS

log = logging.getLogger(__name__)

_SPAN_COST = 1024  # an extra span takes about the same time as attention over this many tokens of one row
_PART = 32  # queries of a head that a thread takes; if there are no more, the threads share its sums, in another order


class RowSpan(NamedTuple):
    """Rows [low, high) of a pass, which attend together to the first `tokens` indices of their slots. In a target pass
    on a CPU, the number of tokens is rounded up: see `key_counts`."""

    low: int
    high: int
    tokens: int


class KernelCall(NamedTuple):
    """A call of PyTorch's attention: rows [low, high) of a pass attend with the queries [first, last) of each key-value
    head to the first `tokens` indices of their slots."""

    low: int
    high: int
    first: int
    last: int
    tokens: int
    mask: Tensor | None
    """[rows, K, 1 or the number of queries, T]: 0 where a query attends, -inf elsewhere; None if it attends to all"""


class SlotPlan(NamedTuple):
    """Plan of a pass: where keys and values are written, and what each token attends to. All layers share it."""

    first: int
    """slot of the first row"""
    old: int
    """number of tokens per row from earlier passes of the draft"""
    new: int
    """N, the number of new tokens per row"""
    places: Tensor
    """[2 * M * K] flat indices into a layer's memory: where to write the keys of M tokens, then their values"""
    spans: list[RowSpan]
    biases: Sequence[Tensor | None]
    """attention bias of each span, [rows * K, 1 or N * H/K, T]: 0 where a token attends, -inf elsewhere; None if
    it attends to everything"""
    calls: dict[int | None, list[list[KernelCall]]]
    """window in tokens, or None -> calls of each span, filled at first use"""
    ahead: _Ahead | None
    """state from which `deeper` plans the next pass of a draft; None in the plan of a target pass"""
    positions: Tensor | None = None
    """[B, N] positions of the new tokens in a target pass; None in a draft"""


class _Ahead(NamedTuple):
    """State of a draft from which its next pass is planned."""

    ends: np.ndarray
    """[B] position of each row's last committed entry, which the first pass of the draft computes"""
    starts: np.ndarray
    """[B] position of the first entry that each row attends to"""
    wraps: bool
    """whether the draft of some row may reach the end of its ring buffer"""
    seen: Tensor | None
    """[B * K, 1, T] attention bias of the last pass; None if all rows attend to all entries"""


class SlotAttention(SlotMemory):
    """Attention over slots. Another attention kernel for the rollout is a subclass, such as `KernelAttention`."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.queries_per_kv = shape.num_heads // shape.num_kv_heads
        self._on_cpu = shape.device.type == "cpu"
        self._seen = torch.zeros((), dtype=shape.dtype, device=shape.device)
        self._hidden = torch.full((), -torch.inf, dtype=shape.dtype, device=shape.device)

    def mask_bytes(self, new: int) -> int:
        queries = self.shape.num_kv_heads if new == 1 else self.shape.num_heads * new
        return 0 if self._on_cpu else queries * self.shape.dtype.itemsize

    # -- plans ---------------------------------------------------------------------------------------------------------

    def plan(self, first: int, lengths: Sequence[int], new: int) -> SlotPlan:
        """Return the plan of a target pass over slots [first, first + B). `attend` needs it.

        Row b has `lengths[b]` committed positions and gets `new` tokens, which follow them. Each attends to itself and
        to everything before it."""
        ends = np.array(lengths)
        assert ends.max() + new <= self.tokens, "the cache must resize before a pass"
        assert rounded_up(self.tokens, self.key_counts) == self.tokens, "slots have room for masked keys"
        places = self._heads(first, len(ends)) + self._indices(ends, 0, new)[..., None]
        committed = self._tensor(ends)[:, None]
        spans = [s._replace(tokens=rounded_up(s.tokens, self.key_counts)) for s in _spans(ends, new)]
        beyond = torch.arange(max(s.tokens for s in spans), device=committed.device) - committed
        biases = [self.bias(beyond[s.low : s.high, : s.tokens], new) for s in spans]
        positions = committed + torch.arange(new, device=committed.device)
        return SlotPlan(first, 0, new, self._both(places), spans, biases, {}, None, positions)

    def plan_draft(self, lengths: np.ndarray, starts: np.ndarray, written: Entries | None) -> SlotPlan:
        """Return the plan of the first pass of a draft, over slots [0, B). `attend` needs it.

        Each row has one query: its last committed entry, `lengths[b] - 1`. It attends to entries [starts[b],
        lengths[b]). `written` lists the entries whose keys and values the pass writes (None: only the last entry of
        each row)."""
        rows, size, longest = len(lengths), self.tokens, int(lengths.max())
        heads = self._heads(0, rows)
        wraps = bool(((lengths - 1) % size + MAX_DRAFT_TOKENS >= size).any())
        ahead = _Ahead(lengths - 1, starts, wraps, None)
        if written is None:
            places = heads + self._indices(ahead.ends, 0, 1)[..., None]
        else:
            places = heads[written.rows, 0] + (written.positions % size)[:, None]
        if lengths.min() < longest or starts.max() > 0:
            ahead = ahead._replace(seen=self.bias(self.beyond(self._tensor(ahead.ends), self._tensor(ahead.starts)), 1))
        span = RowSpan(0, rows, min(size, longest))
        bias = None if ahead.seen is None else ahead.seen[..., : span.tokens]
        return SlotPlan(0, 0, 1, self._both(places), [span], [bias], {}, ahead)

    def deeper(self, plan: SlotPlan) -> SlotPlan:
        """Return the plan of a draft's next pass, with one more token per row. It attends to itself and to everything
        that the token before it attends to. The plan of the previous pass, `plan`, may not be used any more."""
        ahead, old = plan.ahead, plan.old + 1
        assert ahead is not None, "`plan` must be the plan of a draft"
        (span,) = plan.spans
        span = span._replace(tokens=min(self.tokens, span.tokens + 1))
        if plan.old > 0 and not ahead.wraps:
            places = plan.places + 1
        else:
            places = self._both(self._heads(0, len(ahead.ends)) + self._indices(ahead.ends, old, 1)[..., None])
        bias = None
        if ahead.seen is not None:  # the previous pass is over, so its bias is changed in place
            ahead.seen.view(-1).index_fill_(0, places[: len(ahead.seen)], 0.0)
            bias = ahead.seen[..., : span.tokens]
        return SlotPlan(0, old, 1, places, [span], [bias], {}, ahead)

    # Plans of CUDA graphs have fixed shapes, and their values are computed on the device.

    def fixed_plan(self, lengths: Tensor, new: int) -> Any:
        """Return the plan of a target pass over slots [0, B), like `plan`, for a CUDA graph.

        `lengths` [B] are the committed lengths. A row with length -1 is padding: its keys and values are not kept, and
        its output is not used. Every row attends to its whole slot, and the mask hides positions that it does not
        have."""
        rows, committed = len(lengths), lengths.clamp(min=0)[:, None]
        order = torch.arange(max(rows, new, self.tokens), device=lengths.device)
        row = order[:rows].masked_fill(lengths < 0, -1).repeat_interleave(new)
        positions = committed + order[:new]
        bias = self.bias(order[: self.tokens] - committed, new)
        places = self._places(row, positions.flatten())
        return SlotPlan(0, 0, new, places, [RowSpan(0, rows, self.tokens)], [bias], {}, None, positions)

    def level_plan(self, rows: Tensor, positions: Tensor, seen: Tensor) -> SlotPlan:
        """Return the plan of one pass of a draft, with one token per row, for a CUDA graph.

        The pass writes M cache entries: position `positions[m]` of row `rows[m]`. A row of -1 is padding, which is not
        kept. `seen` [B * K, 1, T] is the attention bias: 0 where a row attends, -inf elsewhere."""
        span = RowSpan(0, len(seen) // self.shape.num_kv_heads, self.tokens)
        return SlotPlan(0, 0, 1, self._places(rows, positions), [span], [seen], {}, None)

    def beyond(self, ends: Tensor, starts: Tensor) -> Tensor:
        """Return [B, T]: for each index of a slot, the position stored there minus `ends` [B], the position of the
        row's last committed entry. `starts` [B] are the first visible positions."""
        ends, start = ends[:, None], starts[:, None]
        # the first visible position is at its index, and later positions follow around the ring
        around = torch.arange(self.tokens, device=ends.device) - start % self.tokens
        return around + self.tokens * (around < 0) + (start - ends)

    def bias(self, beyond: Tensor, new: int) -> Tensor:
        """Return the attention bias of `new` tokens, as in `SlotPlan.biases`. `beyond` [rows, T] is the position at
        each slot index, relative to the first new token."""
        return self._bias_of(beyond[:, None] > torch.arange(new, device=beyond.device)[:, None])

    def _bias_of(self, hidden: Tensor) -> Tensor:
        """Return the attention bias of tokens to which the indices `hidden` [rows, N, T] are hidden. If N is 1, the
        query heads that share a key-value head share its only row."""
        bias = torch.where(hidden, self._hidden, self._seen).repeat_interleave(self.shape.num_kv_heads, dim=0)
        if bias.shape[1] == 1 or self.queries_per_kv == 1:
            return bias
        return bias.repeat_interleave(self.queries_per_kv, dim=1)

    # -- attention -----------------------------------------------------------------------------------------------------

    def _cut(self, plan: SlotPlan, span: RowSpan, bias: Tensor | None, window: int | None) -> Iterator[KernelCall]:
        """Yield the calls of a span. On a CPU, each has numbers of queries and keys for which the kernel has one order
        of summation."""
        if window is not None and plan.positions is not None:
            bias = self._within(window, plan.positions[span.low : span.high, :, None], span.tokens, bias)
        mask = None if bias is None else bias.view(span.high - span.low, self.shape.num_kv_heads, -1, span.tokens)
        count, tokens = plan.new * self.queries_per_kv, span.tokens
        for first in range(0, count, QUERIES if self._on_cpu else count):
            last = min(first + QUERIES, count) if self._on_cpu else count
            if self._on_cpu:  # the last query attends to no later token
                end = span.tokens - plan.new + (last - 1) // self.queries_per_kv + 1
                tokens = min(span.tokens, rounded_up(end, self.key_counts))
            shown = None if mask is None else mask[..., :tokens]
            if shown is not None and shown.shape[2] > 1:
                shown = in_full(shown[:, :, first:last], self.shape) if self._on_cpu else shown
            yield KernelCall(span.low, span.high, first, last, tokens, shown)

    def _within(self, window: int, positions: Tensor, tokens: int, bias: Tensor | None) -> Tensor | None:
        if tokens <= window:
            return bias
        outside = torch.arange(tokens, device=positions.device) <= positions - window
        narrow = self._bias_of(outside)
        return narrow if bias is None else narrow + bias

    def attend(
        self, plan: SlotPlan, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None
    ) -> Tensor:
        """Write the keys and values, [B * N, K, E] each, of a pass in this layer. Return the attention output
        [B * N, H * E] of `query` [B * N, H, E].

        If the plan has `written` entries, key and value are [M, K, E], one for each entry. Scores are scaled by E **
        -0.5. Softmax is computed in float32 or wider. A token attends to the last `window` tokens, itself included
        (None: to all)."""
        both, heads, size = self.layers[layer], self.shape.num_kv_heads, self.shape.head_dim
        self.memory[layer].view(-1, size).index_copy_(0, plan.places, torch.cat([key, value]).view(-1, size))
        # queries that share a key-value head become rows of one matmul, so that keys are never repeated
        if plan.new > 1:
            query = query.view(-1, plan.new, heads, self.queries_per_kv, size).transpose(1, 2)
        query = query.reshape(-1, heads, plan.new * self.queries_per_kv, size)
        if window not in plan.calls:
            spans = zip(plan.spans, plan.biases, strict=True)
            plan.calls[window] = [[*self._cut(plan, span, bias, window)] for span, bias in spans]
        parts = [[self._call(query, both, plan, call) for call in calls] for calls in plan.calls[window]]
        mixed = _joined([_joined(part, 2) for part in parts], 0)
        if plan.new > 1:
            mixed = mixed.view(-1, heads, plan.new, self.queries_per_kv, size).transpose(1, 2)
        return mixed.reshape(-1, self.shape.num_heads * size)

    def _call(self, query: Tensor, both: Tensor, plan: SlotPlan, call: KernelCall) -> Tensor:
        """Return the attention output [rows, K, queries, E] of a call. `query` [B, K, n, E] has all queries."""
        keys, values = both[:, plan.first + call.low : plan.first + call.high, :, : call.tokens]
        query = query[call.low : call.high, :, call.first : call.last]
        if self._on_cpu:
            return exact_attention(query, keys, values, call.mask, self.shape)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=call.mask)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def exact_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shape: HeadShape) -> Tensor:
    """Return the attention output of `query` [B, K, n, E] on a CPU, computed with a full number of queries, and with
    work for two threads. `key` and `value` are [B, K, T, E], and `mask` is [B, 1 or K, 1 or a full number, T]."""
    rows, heads, queries, _ = query.shape
    if rows * heads == 1 and queries <= _PART and torch.get_num_threads() > 1:
        query, key, value = (x.expand(2, -1, -1, -1) for x in (query, key, value))
    found = F.scaled_dot_product_attention(in_full(query, shape), key, value, attn_mask=mask)
    return found[:rows, :, :queries]


def in_full(x: Tensor, shape: HeadShape) -> Tensor:
    """Return `x` [B, K, n, E], padded to a full number of queries."""
    more = -x.shape[2] % full_queries(shape.head_dim, shape.dtype)
    return F.pad(x, (0, 0, 0, more)) if more else x


def _spans(lengths: np.ndarray, new: int) -> list[RowSpan]:
    """Cut the rows of a pass into spans, in order. A cut is made where it saves more padding than an extra span costs.
    `new` is the number of new tokens per row."""

    def cut(low: int, high: int) -> list[RowSpan]:
        part, count = lengths[low:high], np.arange(1, high - low)
        longest_until, longest_from = np.maximum.accumulate(part), np.maximum.accumulate(part[::-1])[::-1]
        whole = longest_from[0]
        saved = count * (whole - longest_until[:-1]) + count[::-1] * (whole - longest_from[1:])
        if saved.max(initial=0) <= _SPAN_COST:
            return [RowSpan(low, high, int(whole) + new)]
        at = low + 1 + int(saved.argmax())
        return cut(low, at) + cut(at, high)

    return cut(0, len(lengths))


def attention_for(shape: HeadShape) -> SlotAttention:
    """Return empty slots for the target or the learned drafter. Add another attention kernel here."""
    if shape.device.type == "cuda":
        # cuDNN makes a plan for each new shape, which takes 43 ms on an H100, and most passes have a new shape
        torch.backends.cuda.enable_cudnn_sdp(False)
    if not has_kernels(shape):
        return SlotAttention(shape)
    from tlt.attention.kernels import KernelAttention

    return KernelAttention(shape)


@cache
def has_kernels(shape: HeadShape) -> bool:
    """Return whether `kernels.py` runs on the device and computes attention with heads of this shape. Other GPUs, and
    models in float64, get PyTorch's attention."""
    if shape.dtype == torch.float64 or not has_kernel(shape.device):
        return False
    from tlt.attention.kernels import KernelAttention

    slots = KernelAttention(shape)
    slots.resize(1, 16)
    heads = torch.zeros(
        1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=shape.device
    )
    query, key, value = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    try:
        slots.attend(slots.plan(0, [0], 1), 0, query, key, value)
    except Exception as error:
        log.warning("attention runs in PyTorch, because Triton's does not run on %s: %s", shape.device, error)
        return False
    return True
