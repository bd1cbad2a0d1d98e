"""Attention of whole sequences for the update, with the bits of the engine's attention (`SlotAttention`) on a CPU.

Numbers of keys are rounded up and masked, and queries come in full blocks, as in a pass of the engine. So a token has
the same bits, whether it was decoded alone, verified as a draft token or computed in an update.

Shapes: M tokens in a pass, B segments in a batch, N tokens per segment, T keys, H query heads, K key-value heads, E
head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.attention.key_counts import QUERIES, key_counts, rounded_up
from tlt.attention.slot_memory import HeadShape
from tlt.attention.slots import exact_attention, in_full


class Segment(NamedTuple):
    """Tokens [low, high) of a pass. They attend to the tokens `before` of the pass, and to each other causally."""

    before: range
    low: int
    high: int


class _Batch(NamedTuple):
    """Segments of similar lengths. Short ones are padded at their ends."""

    queries: Tensor  # [B * N] token of each query
    keys: Tensor  # [B * T] token of each key
    mask: Tensor  # [B, 1, N * H/K, T] 0 where a query attends, -inf elsewhere
    kept: Tensor  # indices of the queries that are not padding
    blocks: list[tuple[int, int, int]]  # queries [low, high) and number of their keys


class SequenceAttention:
    """Plan of the attention of a pass, which all its layers share."""

    def __init__(self, segments: Sequence[Segment], shape: HeadShape) -> None:
        self.shape = shape
        self._group = shape.num_heads // shape.num_kv_heads
        self._counts = key_counts(shape.head_dim, shape.dtype, shape.device.type)
        self._batches = [self._batch(some) for some in _alike(segments)]
        written = torch.cat([batch.queries[batch.kept] for batch in self._batches])
        self._order = torch.empty_like(written).scatter_(0, written, torch.arange(len(written)))

    def _batch(self, segments: Sequence[Segment]) -> _Batch:
        most, longest = max(s.high - s.low for s in segments), max(len(s.before) for s in segments)
        queries = torch.zeros(len(segments), most, dtype=torch.long)
        keys = torch.zeros(len(segments), rounded_up(longest + most, self._counts), dtype=torch.long)
        for row, s in enumerate(segments):
            own = torch.arange(s.low, s.high)
            queries[row, : len(own)] = own
            keys[row, : len(s.before) + len(own)] = torch.cat([torch.arange(s.before.start, s.before.stop), own])
        places = torch.arange(keys.shape[1])
        before, own = torch.tensor([[len(s.before), s.high - s.low] for s in segments]).T[..., None]
        hidden = places > (before + places[:most])[..., None]
        mask = torch.zeros(hidden.shape, dtype=self.shape.dtype).masked_fill_(hidden, -torch.inf)
        kept = (places[:most] < own).flatten().nonzero()[:, 0]
        blocks = [*self._blocks(longest, most)]
        return _Batch(queries.flatten(), keys.flatten(), mask.repeat_interleave(self._group, 1)[:, None], kept, blocks)

    def _blocks(self, before: int, most: int) -> Iterator[tuple[int, int, int]]:
        """Yield blocks of queries [low, high), with the number of keys that the last query of a block needs."""
        step = max(1, QUERIES // self._group)
        for low in range(0, most, step):
            high = min(low + step, most)
            yield low * self._group, high * self._group, rounded_up(before + high, self._counts)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention [M, H * E] of `query` [M, H, E], for `key` and `value` [M, K, E]."""
        heads, size = self.shape.num_kv_heads, self.shape.head_dim
        query = query.view(-1, heads, self._group, size)
        key, value = (x.transpose(0, 1) for x in (key, value))
        parts = []
        for batch in self._batches:
            rows = len(batch.mask)
            q = query[batch.queries].view(rows, -1, heads, self._group, size)
            q = q.transpose(1, 2).reshape(rows, heads, -1, size)
            k, v = (x[:, batch.keys].view(heads, rows, -1, size).transpose(0, 1) for x in (key, value))
            found = [
                exact_attention(
                    q[:, :, low:high],
                    k[:, :, :tokens],
                    v[:, :, :tokens],
                    in_full(batch.mask[:, :, low:high, :tokens], self.shape),
                    self.shape,
                )
                for low, high, tokens in batch.blocks
            ]
            mixed = torch.cat(found, dim=2).view(rows, heads, -1, self._group, size).transpose(1, 2)
            parts.append(mixed.reshape(-1, heads * self._group * size)[batch.kept])
        return torch.cat(parts)[self._order]


def _alike(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Yield batches of segments that are not empty. In a batch no length is more than twice the shortest."""
    batch: list[Segment] = []
    for one in sorted((s for s in segments if s.high > s.low), key=lambda s: (s.low - s.high, -len(s.before))):
        if batch and (2 * _lengths(one)[0] < _lengths(batch[0])[0] or 2 * _lengths(one)[1] < _lengths(batch[0])[1]):
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def _lengths(segment: Segment) -> tuple[int, int]:
    """Return the numbers of queries and of keys."""
    own = segment.high - segment.low
    return own, len(segment.before) + own
