"""Acceptance rates of draft tokens, by drafter and level (depth in the draft). From them, the tuner predicts how many
tokens a round commits.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

_DEEPEST = 64  # levels of a draft whose acceptance is counted
_KEPT = 1 - 1 / 64  # factor on the counts of recent rounds, applied at every round
_KEPT_LASTING = 1 - 1 / 256  # factor on the lasting counts of a source, applied at every round of this source
_PRIOR_ROWS = 2  # number of rows that an assumed acceptance rate counts as
_ROWS_OF_EVALUATION = 8  # number of rows that a new drafter's rate on held-out data counts as

Source = tuple[str, int]
"""(name of the drafter, branching): draft tokens with the same source are counted together"""


class AcceptanceModel:
    """Acceptance rate at each level: the probability that a draft token is accepted if all draft tokens before it were.
    The estimate is that of Kaplan and Meier: a row counts only at the levels that it reached. So chains of all depths
    are combined. Older rounds have smaller weights."""

    def __init__(self) -> None:
        self.seen: dict[Source, np.ndarray] = {}
        """recent counts per source, [_DEEPEST, 2]: rows that reached each level, and rows whose token there was
        accepted"""
        self._lasting: dict[Source, np.ndarray] = {}  # the same over more rounds, and not aged in rounds of others

    def age(self) -> None:
        """Reduce the weight of all recent rounds."""
        for levels in self.seen.values():
            levels *= _KEPT

    def add(self, source: Source, depths: Sequence[int], tokens: Sequence[int]) -> None:
        """Count the rows of a round. Row i had a draft of `depths[i]` levels and committed `tokens[i]` tokens, bonus
        token included."""
        drafted = np.array(depths)[:, None]
        right, level = np.minimum(np.array(tokens)[:, None] - 1, drafted), np.arange(_DEEPEST)
        counts = np.stack([(level <= np.minimum(right, drafted - 1)).sum(0), (level < right).sum(0)], axis=1)
        self.seen[source] = self.seen.get(source, 0.0) + counts
        self._lasting[source] = _KEPT_LASTING * self._lasting.get(source, 0.0) + counts

    def lasting(self, source: Source, depth: int, prior: float) -> list[float]:
        """Return the acceptance rates of the first `depth` levels over more rounds than `chances`. They do not change
        while the source is not used. The assumed rate `prior` counts as 2 rows."""
        return _rates(self._lasting.get(source), depth, [prior])

    def chances(self, source: Source, depth: int, prior: Sequence[float]) -> list[float]:
        """Return the acceptance rates of the first `depth` levels. `prior[level]` is an assumed rate, which counts as 2
        rows. A level beyond the given priors uses the rate of the level before it as its prior."""
        return _rates(self.seen.get(source), depth, prior)

    def assume(self, drafter: str, chance: float) -> None:
        """Set the counts of the drafter's chains as if 8 rows had been drafted with acceptance rate `chance` at each
        level."""
        reached = _ROWS_OF_EVALUATION * chance ** np.arange(_DEEPEST, dtype=np.float64)
        self.seen[drafter, 1] = np.stack([reached, reached * chance], axis=1)

    def forget(self, drafter: str) -> None:
        self.seen = {source: levels for source, levels in self.seen.items() if source[0] != drafter}
        self._lasting = {source: levels for source, levels in self._lasting.items() if source[0] != drafter}

    def state(self) -> list[Any]:
        """Return the counts as plain data for a checkpoint."""
        none = np.zeros((0, 2))
        both = [(source, seen, self._lasting.get(source, none)) for source, seen in self.seen.items()]
        return [[*source, *(levels[levels[:, 0] > 0].tolist() for levels in counts)] for source, *counts in both]

    def load_state(self, state: Iterable[Any], drafters: Collection[str]) -> None:
        """Load the counts that `state` returned, for these drafters only."""
        for drafter, branching, *saved in state:
            if drafter in drafters:
                for counts, levels in zip((self.seen, self._lasting), saved, strict=False):  # older states have one
                    padded = counts[drafter, branching] = np.zeros((_DEEPEST, 2))
                    padded[: len(levels)] = np.array(levels[:_DEEPEST]).reshape(-1, 2)


def _rates(counts: np.ndarray | None, depth: int, prior: Sequence[float]) -> list[float]:
    """Return the acceptance rates of the first `depth` levels, see `AcceptanceModel.chances`."""
    found = list[float]()
    known = counts[:depth].tolist() if counts is not None else [(0.0, 0.0)] * depth
    for level, (reached, right) in enumerate(known):
        expected = prior[level] if level < len(prior) else found[-1]
        found.append((right + _PRIOR_ROWS * expected) / (reached + _PRIOR_ROWS))
    return found
