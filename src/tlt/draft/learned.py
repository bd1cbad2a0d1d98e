"""Learned drafter in the engine: an `EagleLayer` with the drafter protocol, for all rows at once.

In a single layer, an entry's keys and values depend on its own input alone, not on attention. So the cache of a row can
be rebuilt exactly from its feature window in one batched pass, at any time: after rounds without this drafter, after a
swap of drafters, or after a preemption.

A slot of the cache holds the window and the draft tokens of one round, which follow the committed entries.

Shapes: B rows, M entries, D hidden size, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.attention.slot_memory import Entries, HeadShape
from tlt.attention.slots import attention_for
from tlt.cuda_graph import Addresses, rounded_up
from tlt.draft.drafter import Candidates, Level, Sources
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import FeatureView
from tlt.draft.fused import FusedLayer
from tlt.draft.replayed_chain import ChainShape, ReplayedChain
from tlt.models.decoder import Decoder
from tlt.sampling import SamplingTensors
from tlt.types import MAX_DRAFT_TOKENS, Request


class Missing(NamedTuple):
    """Entries of the feature window that the next pass computes: those that the cache lacks, and the last entry of each
    row in any case."""

    rows: np.ndarray
    """[M] row of each entry"""
    positions: np.ndarray
    """[M] position of each entry in its row"""
    last: np.ndarray
    """[B] index of each row's last entry among the M entries"""
    starts: np.ndarray
    """[B] position of the oldest entry that each row attends to"""
    lengths: np.ndarray
    """[B] number of entries of each row, at least 1"""
    blind: np.ndarray
    """rows without hidden states, which get no draft tokens"""


class EagleDrafter:
    name = "eagle"

    def __init__(self, layer: EagleLayer, target: Decoder) -> None:
        self.options, self.target = layer.options, target
        self.acceptance_rate = layer.acceptance_rate
        self.fused = FusedLayer(layer, target)
        self.whole_chains = target.cuda_graphs
        o = self.options
        shape = HeadShape(1, o.num_heads, o.num_kv_heads, o.head_dim, target.dtype, target.device)
        self.attention = attention_for(shape)
        self.ready: list[int] = []  # by row: entries below this one are in the cache
        self.chains: dict[ChainShape, ReplayedChain] = {}
        self._addresses = Addresses()

    @torch.inference_mode()
    def begin(self, window: FeatureView | None) -> None:
        assert window is not None, "the learned drafter needs the target's hidden states"
        assert window.layout == self.options.layout, "the window must have this drafter's layout"
        self.window = window
        for slot in range(min(len(self.ready), self.attention.slots)):  # rows of an interrupted rollout
            self.attention.wipe(slot, 0)
        self.ready = []
        self.fused.begin()

    def open(self, request: Request, committed: Sequence[int]) -> None:
        self.ready.append(0)

    def commit(self, row: int, tokens: Sequence[int]) -> None: ...  # the window has the entries

    @torch.inference_mode()
    def close(self, row: int, last: int) -> None:
        slots = self.attention.slots
        if row < last < slots:
            self.attention.copy(last, row, self.window.capacity)
        left = last if last < slots else row
        if left < slots:  # the slot's next row must not find values that are not finite
            self.attention.wipe(left, 0)
        self.ready[row] = self.ready[last]
        self.ready.pop()

    @torch.inference_mode()
    def predict(self, level: Level) -> Candidates:
        missing = self._catch_up(level.alive) if level.depth == 0 else None
        self.hidden = self._first(missing) if missing else self._deeper(level)  # [B, D]
        log_q = self.fused.log_q(self.hidden, level.sampling)
        if missing and len(missing.blind):
            log_q[self._tensor(missing.blind)] = -torch.inf
        vocabulary = self.fused.vocabulary
        return Candidates(None if vocabulary is None else vocabulary.expand_as(log_q), log_q)

    @torch.inference_mode()
    def draft_chain(self, alive: np.ndarray, sampling: SamplingTensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        missing = self._catch_up(alive)
        window, target = self.window, self.target
        if self._addresses.have_changed(
            self.attention.memory[0], window.features, window.tokens, target.embedding, target.head
        ):
            self.chains = {}
        rows = min(rounded_up(len(alive)), self.attention.slots)
        shape = ChainShape(
            rows, rounded_up(len(missing.rows)), noise.shape[1], sampling.restricted, sampling.tempered, sampling.greedy
        )
        if shape not in self.chains:
            self.chains[shape] = ReplayedChain(self, shape)
        return self.chains[shape](self, missing, sampling, noise)

    # -- the first token, from the target's hidden states --------------------------------------------------------------

    def _catch_up(self, alive: np.ndarray) -> Missing:
        """Return the entries that the caller must write to the cache now, and record them as written. Rows that are not
        `alive` are caught up later."""
        if len(self.ready) > self.attention.slots:  # at the first use, so that unused drafters need no memory
            self.attention.resize(max(8, 2 ** (len(self.ready) - 1).bit_length()), self.window.capacity)
        starts, lengths, ready = self.window.starts, self.window.lengths, np.array(self.ready)
        held = np.maximum(lengths, 1)  # a row without entries gets an empty one
        # always include the last entry, for its query
        low = np.where(alive, np.minimum(np.maximum(starts, ready), lengths - 1), lengths - 1).clip(0)
        self.ready = np.where(alive, lengths, np.minimum(ready, lengths - 1)).tolist()
        counts = held - low
        last = np.cumsum(counts) - 1
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(rows)) + np.repeat(held - 1 - last, counts)
        blind = np.flatnonzero(starts >= lengths)
        return Missing(rows, positions, last, np.minimum(starts, held - 1), held, blind)

    def _first(self, missing: Missing) -> Tensor:
        """Write the missing entries to the cache. Return the layer's output [B, D] for each row's last entry."""
        window, rows = self.window, missing.rows
        places = rows * window.capacity + missing.positions % window.capacity
        at, positions = self._tensor(np.stack([places, missing.positions]))
        g = self.fused.inputs(window.features.flatten(0, 1).index_select(0, at))
        cis = self.target.cis(positions)
        q, kv, residual = self.fused.project(window.tokens.view(-1).index_select(0, at), g, cis)
        caught_up = len(rows) == len(missing.last)
        written = None if caught_up else Entries(rows, missing.positions)
        self.plan = self.attention.plan_draft(missing.lengths, missing.starts, written)
        positions = np.minimum(np.add.outer(missing.lengths, range(MAX_DRAFT_TOKENS)), self.options.max_positions - 1)
        self.cis = self.target.cis(self._tensor(positions))  # [B, depth, 1, E/2]
        if not caught_up:
            at_last = self._tensor(missing.last)
            q, residual = q[at_last], residual[at_last]
        return self.attend(q, kv, residual, self.plan)

    # -- further tokens, from its own output ---------------------------------------------------------------------------

    def _deeper(self, level: Level) -> Tensor:
        self.plan = self.attention.deeper(self.plan)
        cis = self.cis[:, level.depth - 1]
        return self.attend(*self.fused.project(self._tensor(level.tokens), self.hidden, cis), self.plan)

    def attend(self, query: Tensor, kv: Tensor, residual: Tensor, plan: Any) -> Tensor:
        """Write keys and values `kv` [M, 2, K, E]. Return the layer's output [B, D] for queries [B, H, E]."""
        return self.fused.output(self.attention.attend(plan, 0, query, kv[:, 0], kv[:, 1]), residual)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.target.device)


def make(sources: Sources) -> EagleDrafter:
    assert sources.layer, "the learned drafter needs weights"
    return EagleDrafter(sources.layer, sources.target)
