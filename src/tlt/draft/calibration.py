"""Online counts of accepted draft tokens. They decide where a draft ends, because unlikely tokens are not verified.

Given the noise, one quantity predicts whether a draft token is accepted: its lead, which is its noisy score (log q plus
noise) minus that of the second best token. log q itself adds almost nothing to the prediction. So each drafter has
counts per cell: (class of draft token, depth, lead).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

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
