"""Acceptance rates of draft tokens by level, counted over all rounds of a drafter. The tuner predicts tokens from them.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

_DEEPEST = 64  # levels of a draft whose acceptance is counted
_KEPT = 1 - 1 / 64  # weight of earlier rounds in the acceptance rates, from one round to the next
_PRIOR_ROWS = 2  # weight, in rows, of the acceptance rate that is expected before any was seen
_ROWS_OF_EVALUATION = 8  # weight, in rows, of the acceptance rate that a new drafter had on held-out data

Source = tuple[str, int]
"""(drafter, branching)"""


class AcceptanceModel:
    """Probability that a draft token is accepted if those before it are, level by level. It is Kaplan and Meier's
    estimate: a chain that was accepted to its end gives no information about later levels. So chains of all depths are
    combined. Older rounds have smaller weights."""

    def __init__(self) -> None:
        self.seen: dict[Source, np.ndarray] = {}
        """[_DEEPEST, 2]: rows that reached the level, and rows that were accepted there"""

    def age(self) -> None:
        """Reduce the weight of earlier rounds after a round, even if it used another drafter."""
        for levels in self.seen.values():
            levels *= _KEPT

    def add(self, source: Source, depths: Sequence[int], tokens: Sequence[int]) -> None:
        """Add rows that committed `tokens` tokens each, the bonus token included, with drafts of these depths."""
        drafted = np.array(depths)[:, None]
        right, level = np.minimum(np.array(tokens)[:, None] - 1, drafted), np.arange(_DEEPEST)
        levels = self.seen.setdefault(source, np.zeros((_DEEPEST, 2)))
        levels[:, 0] += (level <= np.minimum(right, drafted - 1)).sum(0)
        levels[:, 1] += (level < right).sum(0)

    def chances(self, source: Source, depth: int, prior: Sequence[float]) -> list[float]:
        """Return the acceptance rate of the first levels. The prior of a level counts as a few rows. Beyond the
        given priors it is the rate of the level before."""
        seen, found = self.seen.get(source), list[float]()
        for level in range(depth):
            reached, right = seen[level].tolist() if seen is not None else (0.0, 0.0)
            expected = prior[level] if level < len(prior) else found[-1]
            found.append((right + _PRIOR_ROWS * expected) / (reached + _PRIOR_ROWS))
        return found

    def assume(self, drafter: str, chance: float) -> None:
        """Set the counts as if a few rows had been seen with this acceptance rate at every level."""
        reached = _ROWS_OF_EVALUATION * chance ** np.arange(_DEEPEST)
        self.seen[drafter, 1] = np.stack([reached, reached * chance], axis=1)

    def forget(self, drafter: str) -> None:
        self.seen = {source: levels for source, levels in self.seen.items() if source[0] != drafter}

    def state(self) -> list[Any]:
        """Return the counts as plain data for a checkpoint."""
        return [[*source, levels[levels[:, 0] > 0].tolist()] for source, levels in self.seen.items()]

    def load_state(self, state: Iterable[Any], drafters: Collection[str]) -> None:
        """Load the counts of these drafters."""
        for drafter, branching, levels in state:
            if drafter in drafters:
                seen = self.seen[drafter, branching] = np.zeros((_DEEPEST, 2))
                seen[: len(levels)] = np.array(levels[:_DEEPEST]).reshape(-1, 2)
