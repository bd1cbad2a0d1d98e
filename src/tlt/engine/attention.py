"""Attention over cached keys and values, and the layout they lie in: one contiguous slot a row.

Position p of a sequence lies at index p of its slot. A pass appends its N new nodes behind the committed ones; which of
them a node may see is the tree's business. Rows of very different lengths are attended in several spans, each padded to
its own longest row, because on a CPU the time goes into reading keys and values.
Shapes: R slots, B rows of this pass, N new nodes a row, T tokens, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.models.families import DecoderOptions

_SPAN_COST = 1024  # an extra span costs about as much time as attending this many tokens of one row


class Span(NamedTuple):
    """Rows [low, high) of a pass, attended together over their first `tokens` tokens."""

    low: int
    high: int
    tokens: int


class PassLayout(NamedTuple):
    """Where the new nodes of slots [first, first + B) go, and what they see; built once a pass, used by every layer."""

    first: int
    nodes: int  # N
    places: Tensor  # [B * N * K] index of each new (row, node, head) among all (slot, head, token)
    spans: list[Span]
    biases: list[Tensor]  # for each span [rows * K, 1 or H/K * N, T]: 0 where visible, -inf elsewhere


class SlotStore:
    """Keys and values of R slots of T tokens, per layer, each [R, K, T, E]."""

    def __init__(self, options: DecoderOptions, dtype: torch.dtype, device: torch.device) -> None:
        self.num_kv_heads, self.head_dim = options.num_kv_heads, options.head_dim
        self.queries_per_kv = options.num_heads // options.num_kv_heads
        self.dtype, self.device = dtype, device
        self.keys = [self._empty(0, 0) for _ in range(options.num_layers)]
        self.values = [self._empty(0, 0) for _ in range(options.num_layers)]

    def _empty(self, slots: int, tokens: int) -> Tensor:
        # zeros: a masked index has weight 0, and 0 * NaN of uninitialised memory would be NaN
        return torch.zeros(slots, self.num_kv_heads, tokens, self.head_dim, dtype=self.dtype, device=self.device)

    @property
    def slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[2]

    def resize(self, slots: int, tokens: int) -> None:
        """Re-allocate tensor by tensor (so that the peak is one of them above the sum), keeping what fits."""
        r, t = min(slots, self.slots), min(tokens, self.tokens)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._empty(slots, tokens)
                tensors[layer][:r, :, :t] = old[:r, :, :t]

    def copy_slot(self, source: int, target: int, length: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def move(self, row: Tensor, source: Tensor, target: Tensor) -> None:
        """Token `source[i]` of slot `row[i]` goes to `target[i]`; all are read before any is written."""
        for tensor in (*self.keys, *self.values):
            tensor[row, :, target] = tensor[row, :, source]

    def layout(self, first: int, lengths: Sequence[int], visible: Tensor | None, new: int) -> PassLayout:
        """`lengths` [B] committed tokens of slots first..; `visible` [B, N, N]: node n sees new node m (None: chains, a
        node sees those before it and itself).

        Every node sees all committed tokens of its own slot.
        """
        assert max(lengths) + new <= self.tokens, "the cache makes room before a pass"
        committed = torch.tensor(lengths, device=self.device)
        row = torch.arange(first, first + len(lengths), device=self.device)
        place = committed[:, None] + torch.arange(new, device=self.device)  # [B, N]
        head = torch.arange(self.num_kv_heads, device=self.device)
        places = (row[:, None, None] * self.num_kv_heads + head) * self.tokens + place[:, :, None]  # [B, N, K]
        spans = _spans(lengths, new)
        biases = [self._bias(span, committed, visible, new) for span in spans]
        return PassLayout(first, new, places.view(-1), spans, biases)

    def _bias(self, span: Span, committed: Tensor, visible: Tensor | None, new: int) -> Tensor:
        rows, T = slice(span.low, span.high), span.tokens
        beyond = torch.arange(T, device=self.device) - committed[rows, None]  # [rows, T], >= 0 from the first new node
        if visible is None:
            hidden = beyond[:, None] > torch.arange(new, device=self.device)[:, None]
        else:
            which = beyond.clamp(0, new - 1)[:, None].expand(-1, new, T)
            hidden = (beyond >= 0)[:, None] & ~(visible[rows].gather(2, which) & (beyond < new)[:, None])
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        heads, share = self.num_kv_heads, self.queries_per_kv if new > 1 else 1
        return bias[:, None, None].expand(-1, heads, share, -1, -1).reshape(-1, share * new, T)

    def attend(self, layout: PassLayout, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write key, value [B * N, K, E]; attend query [B * N, H, E] -> [B * N, H * E]."""
        keys, values = self.keys[layer], self.values[layer]
        keys.view(-1, self.head_dim).index_copy_(0, layout.places, key.reshape(-1, self.head_dim))
        values.view(-1, self.head_dim).index_copy_(0, layout.places, value.reshape(-1, self.head_dim))
        # the queries that share a key-value head become the rows of one matmul: keys are never repeated
        if layout.nodes > 1:
            query = query.view(-1, layout.nodes, self.num_kv_heads, self.queries_per_kv, self.head_dim)
            query = query.permute(0, 2, 3, 1, 4)
        folded = query.reshape(-1, self.queries_per_kv * layout.nodes, self.head_dim)
        parts = [
            self._attend_span(folded, keys, values, layout.first, span, bias)
            for span, bias in zip(layout.spans, layout.biases, strict=True)
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        if layout.nodes > 1:
            mixed = mixed.view(-1, self.num_kv_heads, self.queries_per_kv, layout.nodes, self.head_dim)
            mixed = mixed.permute(0, 3, 1, 2, 4)
        return mixed.reshape(-1, self.num_kv_heads * self.queries_per_kv * self.head_dim)

    def _attend_span(self, query: Tensor, keys: Tensor, values: Tensor, first: int, span: Span, bias: Tensor) -> Tensor:
        """query [B * K, H/K * N, E] -> the span's rows of the same; softmax in float32 or wider."""
        slots = slice(first + span.low, first + span.high)
        query = query.narrow(0, span.low * self.num_kv_heads, len(bias))
        seen_keys, seen_values = (x[slots, :, : span.tokens].flatten(0, 1) for x in (keys, values))
        scores = torch.baddbmm(bias, query, seen_keys.transpose(1, 2), alpha=self.head_dim**-0.5)
        wide = torch.float32 if self.dtype == torch.bfloat16 else None
        return torch.bmm(torch.softmax(scores, dim=-1, dtype=wide).to(self.dtype), seen_values)


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
