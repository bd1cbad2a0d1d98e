"""Draft chains with shared noise. The chains of all rows grow together, one token at a time, while they are likely.

A draft token is the drafter's best token by log q plus the noise of its position. The target adds the same noise.

Unlikely tokens are not verified, so a draft ends there. Given the noise, one quantity predicts whether a draft token is
accepted: its lead, which is its noisy score (log q plus noise) minus that of the second best token. log q itself adds
almost nothing to the prediction. So each drafter has counts of accepted tokens per cell: (class of draft token, depth,
lead).

Shapes: B rows, K candidates per row, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.draft.drafter import Candidates, ChainDrafter, Drafter, Level
from tlt.draft.strategy import Strategy
from tlt.models.device import to_host
from tlt.sampling import SamplingTensors, gumbel_topk

CLASSES = 4  # number of classes of draft tokens that a drafter may distinguish
_EDGES = np.array([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_DEPTHS, _LEADS = 8, len(_EDGES) + 1  # deeper tokens count at the last index
_SHAPE = (CLASSES, _DEPTHS, _LEADS)
_PRIOR = 1.0 / (1.0 + np.exp(-np.array([0.0, *_EDGES])))  # [_LEADS] logistic curve of the cell's smallest lead
_PRIOR_WEIGHT = 4.0
# rounds after which all counts are halved, because drafters and targets change
_HALF_LIFE = 256
_PREDECESSOR_WEIGHT = 2.0  # maximum count that each cell keeps when a new drafter replaces the old one
_REFRESH = 8  # rounds between two updates of the table


class Calibration:
    """Acceptance counts of one drafter."""

    def __init__(self) -> None:
        self.seen, self.agreed = np.zeros(math.prod(_SHAPE)), np.zeros(math.prod(_SHAPE))
        self.rounds = 0
        self._prior = np.broadcast_to(_PRIOR, _SHAPE).ravel()
        self._refresh()

    def _refresh(self) -> None:
        """Update the table: for each cell, the estimated probability that the target accepts a draft token if all draft
        tokens before it were accepted. It is computed from the counts and a prior of 4 pseudo-counts."""
        self.table = (self.agreed + _PRIOR_WEIGHT * self._prior) / (self.seen + _PRIOR_WEIGHT)

    def cells(self, classes: np.ndarray | None, depth: int, scores: np.ndarray) -> np.ndarray:
        """Return the calibration cell of each row's draft token at this depth, [B]. `scores` [B, 2] are the noisy
        scores of the best and the second best candidate ([B, 1]: there is no second). `classes` [B] are the classes of
        the draft tokens (None: all 0)."""
        with np.errstate(invalid="ignore"):  # tokens that may not be drafted have score -inf
            lead = scores[:, 0] - scores[:, 1] if scores.shape[1] > 1 else np.full(len(scores), np.inf)
        cell = np.searchsorted(_EDGES, lead) + min(depth, _DEPTHS - 1) * _LEADS
        return cell if classes is None else cell + classes * (_DEPTHS * _LEADS)

    def observe(self, verified: Collection[tuple[Sequence[int], int]]) -> None:
        """Count verified drafts: the cells of each draft's tokens, and the number of accepted ones. Tokens after the
        first rejected one do not count."""
        agreed = [cell for cells, accepted in verified for cell in cells[:accepted]]
        rejected = [cells[accepted] for cells, accepted in verified if accepted < len(cells)]
        self.agreed += np.bincount(np.array(agreed, dtype=int), minlength=len(self.agreed))
        self.seen += np.bincount(np.array(agreed + rejected, dtype=int), minlength=len(self.seen))

    def acceptance_rates(self, depth: int) -> list[float | None]:
        """Return, for each of the first `depth` depths (at most 8), the share of draft tokens that were accepted. Only
        draft tokens of class 0 count. The share is None if nothing was counted at this depth."""
        seen, agreed = (x.reshape(_SHAPE)[0].sum(1) for x in (self.seen, self.agreed))
        return [float(agreed[d] / seen[d]) if seen[d] else None for d in range(min(depth, _DEPTHS))]

    def renew(self) -> None:
        """Reduce the weight of the old drafter's counts when a new drafter replaces it. Otherwise, cells in which the
        old drafter's draft tokens were always rejected would never be tried again."""
        less = np.minimum(1.0, _PREDECESSOR_WEIGHT / np.maximum(self.seen, 1.0))
        self.seen *= less
        self.agreed *= less
        self._refresh()

    def next_round(self) -> None:
        self.rounds += 1
        if self.rounds % _HALF_LIFE == 0:
            self.seen /= 2
            self.agreed /= 2
        if self.rounds % _REFRESH == 0 or self.rounds < _REFRESH:
            self._refresh()


class Draft(NamedTuple):
    """Draft of one row: tokens that may follow its last committed token, which is called the root."""

    tokens: Sequence[int] = ()
    cells: Sequence[int] = ()
    """calibration cell of each token (see `Calibration`); empty for a look-ahead draft"""
    ahead: bool = False
    """whether this is a look-ahead draft"""


class Roots(NamedTuple):
    """Roots of the drafts of B rows, and the limits that each row sets to its draft."""

    tokens: np.ndarray
    """[B] last committed token of each row"""
    room: np.ndarray
    """[B] maximum number of tokens that each response may still get"""
    stops: np.ndarray
    """[B, S] stop tokens, padded with -1"""
    sampling: SamplingTensors
    """sampling parameters of the B requests, for the drafter"""
    device: torch.device
    """device of the noise, on which candidates are ranked"""


NoiseOf = Callable[[int, Tensor | None], Tensor]
"""Function (depth, token ids [B, K] or None) -> noise at each row's next position + depth: [B, K] for these ids, or
[B, V] for all tokens."""


class _Best(NamedTuple):
    """Best candidate of each row at one depth."""

    tokens: np.ndarray
    """[B]"""
    scores: np.ndarray
    """[B, 2] log q plus noise of the two best candidates; [B, 1] if there is only one"""
    classes: np.ndarray | None = None
    """[B] as in `Candidates`"""


BestOf = Callable[[int, np.ndarray, np.ndarray], _Best]
"""Function (depth, last token of each chain [B], whether it is continued [B]) -> best candidates at this depth"""


def draft_chains(
    drafter: Drafter, roots: Roots, strategy: Strategy, noise_of: NoiseOf, vocab_size: int, calibration: Calibration
) -> list[Draft]:
    """Draft a chain for each row. Candidates are ranked on the device. The rest runs in NumPy, because it is small."""
    best_of = _whole_chains(drafter, roots, strategy, noise_of) or _one_by_one(drafter, roots, noise_of, vocab_size)
    tokens, chance, alive = roots.tokens, np.ones(len(roots.tokens)), roots.room > 1
    columns: list[tuple[np.ndarray, np.ndarray]] = []
    counts = np.zeros(len(tokens), dtype=np.int64)
    for depth in range(strategy.depth):
        if not alive.any():
            break
        tokens, scores, classes = best_of(depth, tokens, alive)
        cells = calibration.cells(classes, depth, scores)
        # a score that is not finite belongs to a token that may not be drafted
        valid = np.isfinite(scores[:, 0]) & (tokens >= 0) & (tokens < vocab_size)
        chance = chance * (alive & valid) * calibration.table[cells]
        chance *= chance >= strategy.min_chance
        columns.append((tokens, cells))
        counts += chance > 0
        # nothing follows a stop token, and the last token of a response is the bonus token of the pass
        alive = (chance > 0) & (roots.room > depth + 2) & (tokens[:, None] != roots.stops).all(1)
    if not columns:
        return [Draft()] * len(counts)
    drafted, cells = (np.stack(column, axis=1).tolist() for column in zip(*columns, strict=True))
    return [Draft(row[:n], where[:n]) for row, where, n in zip(drafted, cells, counts.tolist(), strict=True)]


def _whole_chains(drafter: Drafter, roots: Roots, strategy: Strategy, noise_of: NoiseOf) -> BestOf | None:
    """Draft whole chains on the device and return their tokens as a function. If the drafter does not do so on this
    machine, return None."""
    if not (isinstance(drafter, ChainDrafter) and drafter.whole_chains):
        return None
    noise = torch.stack([noise_of(depth, None) for depth in range(strategy.depth)], dim=1)
    tokens, scores = to_host(*drafter.draft_chain(roots.room > 1, roots.sampling, noise))
    return lambda depth, *_: _Best(tokens[:, depth], scores[:, depth])


def _one_by_one(drafter: Drafter, roots: Roots, noise_of: NoiseOf, vocab_size: int) -> BestOf:
    """Return a function that calls the drafter for each depth. The host waits for the device once per call."""

    def best_of(depth: int, tokens: np.ndarray, alive: np.ndarray) -> _Best:
        candidates = drafter.predict(Level(depth, tokens.copy(), alive.copy(), roots.sampling))
        _check_shapes(candidates, len(tokens), vocab_size)
        ids = None if candidates.ids is None else candidates.ids.to(roots.device)
        best = gumbel_topk(candidates.log_q.to(roots.device), noise_of(depth, ids), k=2)
        first = best.picks[:, :1]
        scores, drafted = to_host(best.scores, first if ids is None else ids.gather(-1, first))
        return _Best(drafted[:, 0], scores, candidates.classes)

    return best_of


def _check_shapes(candidates: Candidates, rows: int, vocab_size: int) -> None:
    """Raise ValueError for candidates of a wrong shape or type, because NumPy would broadcast them to wrong rows."""
    ids, log_q, classes = candidates
    width = (vocab_size,) if ids is None else tuple(ids.shape[1:])
    if tuple(log_q.shape) != (rows, *width) or (ids is not None and tuple(ids.shape) != tuple(log_q.shape)):
        raise ValueError(
            f"Candidates.log_q must have shape {(rows, *width)}, not {tuple(log_q.shape)}, and ids the same if given"
        )
    if ids is not None and ids.dtype != torch.int64:
        raise ValueError(f"Candidates.ids must be int64, not {ids.dtype}")
    if classes is not None and classes.shape != (rows,):
        raise ValueError(f"Candidates.classes must have shape {(rows,)}, not {classes.shape}")
