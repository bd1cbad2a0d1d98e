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
import torch.nn.functional as F
from torch import Tensor

from tlt.attention.slot_memory import Entries, HeadShape
from tlt.attention.slots import attention_for
from tlt.cuda_graph import Addresses, Replayed, rounded_up
from tlt.draft.drafter import Candidates, Level, Sources
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import FeatureView
from tlt.models.decoder import Decoder, RMSNorm, overwrite, rotate_, to_pairs
from tlt.models.device import to_device
from tlt.models.product import Product
from tlt.sampling import SamplingTensors, gumbel_topk, sampling_log_probs
from tlt.types import MAX_DRAFT_TOKENS, Request

_TABLE = 1 << 23  # maximum number of elements of `table`, which has each token's contribution to the first product


class FusedLayer:
    """Fused weights of an `EagleLayer`. The weights of all norms except the output norm are multiplied into its
    matrices."""

    @torch.no_grad()
    def __init__(self, layer: EagleLayer, target: Decoder) -> None:
        """Fuse the weights. Call `begin` before use."""
        self.options = o = layer.options
        self.target = target  # the embedding is read at every use, because it changes with the target's version
        wide = torch.float64 if target.dtype == torch.float64 else torch.float32
        state = {name: t.detach().to(target.device, wide) for name, t in layer.state_dict().items()}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self.norms = {n: RMSNorm(state[n + ".weight"], o.rms_norm_eps) for n in norms if n + ".weight" in state}

        def normed(name: str, weight: Tensor) -> Tensor:
            """Return `weight` [D, ...] times the weight of the norm `name`, for use on the norm's `unit`."""
            return self.norms[name].weight[:, None] * weight

        q, k = (to_pairs(state[f"{x}_proj.weight"], o.head_dim) for x in "qk")
        qkv, fc = torch.cat([q, k, state["v_proj.weight"]]).t(), state["fc.weight"].t()
        # contributions of the embedding and the hidden states to the first product: [residual of eagle1 | q | k | v]
        if o.kind == "eagle3":
            embedding, features = qkv.split(o.hidden_size)
            parts = normed("input_layernorm", embedding), normed("hidden_norm", features)
        else:
            parts = torch.cat([fc, fc @ qkv], dim=1).split(o.hidden_size)
        gate_up = torch.cat([state["gate_proj.weight"], state["up_proj.weight"]]).t()
        matrices = (*parts, fc, state["o_proj.weight"].t(), normed("post_attention_layernorm", gate_up))
        self.table: Tensor | None = None
        self.to_logits: Product | None = None
        self.vocabulary = None if layer.vocabulary is None else layer.vocabulary.to(target.device)
        self.from_embedding, self.from_features, self.fc, self.out, self.gate_up, self.down = (
            Product(weight.t().to(target.dtype)) for weight in (*matrices, state["down_proj.weight"].t())
        )

    @torch.no_grad()
    def begin(self) -> None:
        """Compute the tensors that depend on the target's current weights. They keep their addresses, which CUDA graphs
        have."""
        target = self.target
        if self.options.vocab_size * self.from_embedding.shape[0] <= _TABLE:
            table = self._contribution(target.embedding)
            self.table = table if self.table is None else self.table.copy_(table)
        if self.vocabulary is None:
            self.to_logits = target.to_logits
        elif self.to_logits is None:
            self.to_logits = Product(target.head[self.vocabulary])
        else:
            overwrite(self.to_logits, Product(target.head[self.vocabulary]))

    def inputs(self, features: Tensor) -> Tensor:
        """Map the target's hidden states [M, F] to the fused states [M, D] that `project` reads."""
        D = self.options.hidden_size
        return self.fc(features[:, : 3 * D]) if self.options.kind == "eagle3" else features[:, -D:]

    def _contribution(self, embedded: Tensor) -> Tensor:
        normed = self.norms["input_layernorm"].unit(embedded) if self.options.kind == "eagle3" else embedded
        return self.from_embedding(normed)

    def project(self, tokens: Tensor, g: Tensor, cis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map M tokens, with the fused states `g` [M, D] of the tokens before them, to queries [M, H, E], keys and
        values [M, 2, K, E] and the residual stream [M, D]."""
        o = self.options
        if self.table is not None:
            embedded = F.embedding(tokens, self.table)
        else:
            embedded = self._contribution(F.embedding(tokens, self.target.embedding))
        if o.kind == "eagle3":
            residual, qkv = g, self.from_features(self.norms["hidden_norm"].unit(g), embedded)
        else:
            both = self.from_features(g, embedded)
            residual, qkv = both[:, : o.hidden_size], both[:, o.hidden_size :]
        heads = qkv.view(len(g), -1, o.head_dim)
        rotate_(heads[:, : o.num_heads + o.num_kv_heads], cis)
        return heads[:, : o.num_heads], heads[:, o.num_heads :].view(-1, 2, o.num_kv_heads, o.head_dim), residual

    def output(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """Return the layer's output [M, D] for the attention output `mixed` [M, H * E]."""
        x = self.out(mixed, residual)
        gate, up = self.gate_up(self.norms["post_attention_layernorm"].unit(x)).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up), x)

    def log_q(self, hidden: Tensor, sampling: SamplingTensors) -> Tensor:
        """Return log q [B, V] for the layer's outputs [B, D], over the V tokens that the drafter can propose."""
        normed = self.norms["norm"](hidden) if "norm" in self.norms else hidden
        assert self.to_logits, "call begin first"
        return sampling_log_probs(self.to_logits(normed), sampling)[0]


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


class ChainShape(NamedTuple):
    """Key of a captured chain: its sizes, and the flags of its `SamplingTensors`. `rows` and `entries` (M of `Missing`)
    are rounded up."""

    rows: int
    entries: int
    depth: int
    restricted: bool
    tempered: bool
    greedy: bool


class ReplayedChain:
    """CUDA graph that drafts chains of one shape."""

    def __init__(self, drafter: EagleDrafter, shape: ChainShape) -> None:
        self.shape = shape
        rows, entries, depth, *_ = shape
        device = drafter.target.device
        vocab_size = drafter.options.vocab_size if drafter.fused.vocabulary is None else len(drafter.fused.vocabulary)
        # shared by chains of equal rows and depth, because noise for 64 rows, 5 levels and 151,936 tokens takes 185 MiB
        alike = [chain.noise for chain in drafter.chains.values() if chain.noise.shape[:2] == (rows, depth)]
        self.noise = alike[0] if alike else torch.zeros(rows, depth, vocab_size, device=device)
        self.sampling = [
            torch.ones(rows, dtype=kind, device=device) for kind in (torch.float64, torch.int64, torch.float64)
        ]
        self.missing = torch.zeros(2 * entries + 4 * rows, dtype=torch.int64, device=device)
        self.replayed = Replayed(device)

    def __call__(
        self, drafter: EagleDrafter, missing: Missing, sampling: SamplingTensors, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return draft tokens [B, depth], and each level's two highest noisy scores [B, depth, 2]. `noise` is
        [B, depth, V], also if the drafter can propose only some tokens."""
        count = len(noise)
        self.noise[:count] = noise if drafter.fused.vocabulary is None else noise[..., drafter.fused.vocabulary]
        for fixed, given in zip(self.sampling, (sampling.temperature, sampling.top_k, sampling.top_p), strict=True):
            fixed[:count] = given
        rows, entries = self.shape.rows, self.shape.entries
        blind = np.zeros(rows, dtype=np.int64)
        blind[missing.blind] = 1
        padded, start = np.full(len(self.missing), -1), 0
        by_row = missing.last, missing.lengths - 1, missing.starts, blind
        for size, column in ((entries, missing.rows), (entries, missing.positions), *((rows, one) for one in by_row)):
            padded[start : start + len(column)] = column
            start += size
        self.missing.copy_(to_device(self.missing.device, padded)[0])
        tokens, scores = self.replayed(lambda: self._compute(drafter))
        return tokens[:count], scores[:count]

    def _compute(self, drafter: EagleDrafter) -> tuple[Tensor, Tensor]:
        (rows, entries, depth, *flags) = self.shape
        fused, slots, window = drafter.fused, drafter.attention, drafter.window
        row, position, last, ends, starts, blind = self.missing.split([entries] * 2 + [rows] * 4)
        at = row.clamp(min=0) * window.capacity + position.clamp(min=0) % window.capacity
        g = fused.inputs(window.features.flatten(0, 1).index_select(0, at))
        cis = drafter.target.cis(position.clamp(min=0))
        query, kv, residual = fused.project(window.tokens.view(-1).index_select(0, at), g, cis)
        row_of = torch.arange(rows, device=ends.device).masked_fill(ends < 0, -1)
        last, ends, starts = (x.clamp(min=0) for x in (last, ends, starts))
        seen = slots.bias(slots.beyond(ends, starts), 1)
        plan = slots.level_plan(row, position, seen)
        hidden = drafter.attend(query.index_select(0, last), kv, residual.index_select(0, last), plan)
        temperature, top_k, top_p = self.sampling
        sampling, tokens, scores = SamplingTensors(temperature, top_k, top_p, *flags), list[Tensor](), list[Tensor]()
        for level in range(depth):
            if level > 0:
                own = (ends + level) % slots.tokens
                seen.scatter_(2, own.repeat_interleave(len(seen) // rows)[:, None, None], 0.0)
                cis = drafter.target.cis((ends + level).clamp(max=drafter.options.max_positions - 1))
                hidden = drafter.attend(*fused.project(tokens[-1], hidden, cis), slots.level_plan(row_of, own, seen))
            log_q = fused.log_q(hidden, sampling)
            if level == 0:
                log_q = log_q.masked_fill((blind > 0)[:, None], -torch.inf)
            best = gumbel_topk(log_q, self.noise[:, level], k=2)
            pick = best.picks[:, 0]
            tokens.append(pick if fused.vocabulary is None else fused.vocabulary.index_select(0, pick))
            scores.append(best.scores)
        return torch.stack(tokens, dim=1), torch.stack(scores, dim=1)
