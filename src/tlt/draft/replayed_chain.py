"""Whole draft chain of the learned drafter as one CUDA graph, because the host needs 1.3 ms to start the kernels of one
token.

All tokens are drafted, including unlikely ones, which the host would skip. The chain is cut afterwards.

Shapes: B rows, V vocabulary size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.cuda_graph import Replayed
from tlt.host import to_device
from tlt.sampling import SamplingTensors, gumbel_topk

if TYPE_CHECKING:
    from tlt.draft.learned import EagleDrafter, Missing


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
