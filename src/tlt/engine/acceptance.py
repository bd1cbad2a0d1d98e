"""The acceptance rate of a drafter, level by level. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

_KEPT = 1 - 1 / 64  # weight of earlier rounds, from one round to the next

Source = tuple[str, int]
"""drafter, branching"""


class AcceptanceModel:
    """Probability that a draft token is accepted if those before it are, level by level. It is Kaplan and Meier's
    estimate: a chain that was accepted to its end gives no information about later levels. So chains of all depths are
    combined. Older rounds have smaller weights."""

    def __init__(self) -> None:
        self.seen: dict[Source, np.ndarray] = {}
        """[levels, 2]: rows that reached the level, and rows that were accepted there"""

    def age(self) -> None:
        """Reduce the weight of earlier rounds after a round, whichever drafter it used."""
        for levels in self.seen.values():
            levels *= _KEPT

    def add(self, source: Source, depths: Sequence[int], tokens: Sequence[int]) -> None:
        """Add rows that committed `tokens` tokens each, the bonus token included, with drafts of these depths."""
        deepest = max(depths)
        levels = self.seen.get(source, np.zeros((0, 2)))
        if len(levels) < deepest:
            levels = np.concatenate([levels, np.zeros((deepest - len(levels), 2))])
        drafted, right = np.array(depths), np.minimum(np.array(tokens) - 1, depths)
        levels[:, 0] += _more_than(np.minimum(right, drafted - 1), len(levels))
        levels[:, 1] += _more_than(right - 1, len(levels))
        self.seen[source] = levels

    def levels(self, source: Source, depth: int) -> list[tuple[float, float]]:
        """Return, for each of the first levels, the rows that reached it and the rows that were accepted."""
        seen = self.seen.get(source)
        found = [] if seen is None else [(reached, right) for reached, right in seen[:depth].tolist()]
        return found + [(0.0, 0.0)] * (depth - len(found))

    def chance(self, source: Source, level: int, prior: float, weight: float) -> float:
        """Return the acceptance rate of this level, counted from 0."""
        return chance(self.levels(source, level + 1)[level], prior, weight)

    def assume(self, source: Source, depth: int, chance: float, rows: float) -> None:
        """Set the counts as if this many rows had been seen with this acceptance rate at every level."""
        reached = rows * chance ** np.arange(depth)
        self.seen[source] = np.stack([reached, reached * chance], axis=1)

    def forget(self, drafter: str) -> None:
        self.seen = {source: levels for source, levels in self.seen.items() if source[0] != drafter}

    def state(self) -> list[Any]:
        """Return plain data."""
        return [[*source, levels.tolist()] for source, levels in self.seen.items()]

    def load_state(self, state: Iterable[Any], drafters: Collection[str]) -> None:
        """Load the counts of these drafters."""
        self.seen |= {
            (drafter, branching): np.array(levels, dtype=float).reshape(-1, 2)
            for drafter, branching, levels in state
            if drafter in drafters
        }


def chance(seen: tuple[float, float], prior: float, weight: float) -> float:
    """Return the acceptance rate of a level. The prior counts as much as `weight` rows."""
    reached, right = seen
    return (right + weight * prior) / (reached + weight)


def _more_than(last: np.ndarray, levels: int) -> np.ndarray:
    """Return [levels]: the number of rows whose `last` level is this one or a later one."""
    counts = np.bincount(np.clip(last, -1, levels - 1) + 1, minlength=levels + 1)
    return counts[:0:-1].cumsum()[::-1]
