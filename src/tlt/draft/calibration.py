"""Online counts of accepted draft tokens. They decide which nodes of a draft tree are worth verifying.

Given the noise, two quantities predict acceptance: a draft token's rank among its siblings, and its lead in the noisy
score (log q plus noise). The lead of the best sibling is its score minus that of the second best. The lead of every
other sibling is its score minus that of the best, so it is not positive. log q itself adds almost nothing to the
prediction. So each drafter has counts per cell: (class of draft token, depth, rank, lead).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CLASSES = 4  # number of classes of draft tokens that a drafter may distinguish
_EDGES = np.array([-6.0, -4.0, -2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_DEPTHS, _PLACES, _LEADS = 8, 4, len(_EDGES) + 1  # deeper nodes and later siblings count at the last index
_OFFSETS = [np.minimum(np.arange(16), _PLACES - 1) * _LEADS + d * _PLACES * _LEADS for d in range(_DEPTHS)]
_SHAPE = (CLASSES, _DEPTHS, _PLACES, _LEADS)
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
        self._prior = np.broadcast_to(_prior_table(), _SHAPE).ravel()
        self._refresh()

    def _refresh(self) -> None:
        """Update the table: for each cell, the estimated probability that the target accepts a node whose parent is
        accepted. It is computed from the counts and a prior of 4 pseudo-counts. It stays below 1, so that a child is
        always less likely than its parent."""
        chance = (self.agreed + _PRIOR_WEIGHT * self._prior) / (self.seen + _PRIOR_WEIGHT)
        self.table = np.minimum(chance, 0.9999)

    def cells(self, classes: np.ndarray | None, depth: int, scores: np.ndarray, branching: int) -> np.ndarray:
        """Return the calibration cells [B, W, k] of the k best children of each node. k is `branching`, or the number
        of scores if that is smaller. `scores` [B, W, k or k + 1] are the children's noisy scores, best first. `classes`
        [B, W] has one class for all children of a node (None: all 0)."""
        k = min(branching, scores.shape[-1])
        lead = scores[..., :k] - scores[..., :1]  # -inf for tokens that were not proposed or may not be drafted
        lead[..., 0] = scores[..., 0] - scores[..., 1] if scores.shape[-1] > 1 else np.inf
        cell = np.searchsorted(_EDGES, lead) + _OFFSETS[min(depth, _DEPTHS - 1)][:k]
        return cell if classes is None else cell + classes[..., None] * (_DEPTHS * _PLACES * _LEADS)

    def observe(self, cells: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> None:
        """Count, for one verified tree, which children of accepted nodes were accepted. `cells` and `parents` are those
        of the tree. `path` has the accepted nodes, the root included."""
        reached = set(path)
        for node in range(1, len(cells)):
            if parents[node] in reached:
                self.seen[cells[node]] += 1.0
                self.agreed[cells[node]] += node in reached

    def acceptance_rates(self, depth: int, branching: int) -> list[float | None]:
        """Return, for each of the first `depth` depths (at most 8), the share of accepted nodes that have an accepted
        child among their `branching` best children. Only draft tokens of class 0 count. The share is None if nothing
        was counted at this depth."""
        seen, agreed = (x.reshape(_SHAPE)[0] for x in (self.seen, self.agreed))
        places = min(branching, _PLACES)
        return [
            float(agreed[d, :places].sum() / seen[d, 0].sum()) if seen[d, 0].sum() else None
            for d in range(min(depth, _DEPTHS))
        ]

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


def _prior_table() -> np.ndarray:
    """Return the prior acceptance probabilities [_PLACES, _LEADS]. For the best sibling it is a logistic curve of the
    lead. For a later sibling, whose lead is at most 0, it is 0.5 exp(lead) / rank, with ranks counted from 0."""
    lead = np.array([-8.0, *_EDGES])
    rest = [0.5 * np.exp(np.minimum(0.0, lead)) / place for place in range(1, _PLACES)]
    return np.stack([1.0 / (1.0 + np.exp(-lead)), *rest])
