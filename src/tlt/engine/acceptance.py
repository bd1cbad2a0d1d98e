"""How far a drafter's guesses are right. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

_KEPT = 1 - 1 / 64  # of what was seen, from one round to the next

Source = tuple[str, int]
"""drafter, branching"""


class AcceptanceModel:
    """The chance that a guess is right behind right ones, level by level: Kaplan and Meier's estimate, in which a chain
    that was right to its end says nothing of what would have come behind it. So chains of any depth tell of each other.
    The older a round, the less it counts."""

    def __init__(self) -> None:
        self.seen: dict[Source, np.ndarray] = {}
        """[levels, 2]: rows that reached it, and rows that were right"""

    def age(self) -> None:
        """Have what was seen count for less: a round has passed, in which this drafter or another one was used."""
        for levels in self.seen.values():
            levels *= _KEPT

    def add(self, source: Source, depths: Sequence[int], tokens: Sequence[int]) -> None:
        """Count `tokens` that each row committed, the target's own one among them, with a draft of so many levels (at
        most)."""
        deepest = max(depths)
        levels = self.seen.get(source, np.zeros((0, 2)))
        if len(levels) < deepest:
            levels = np.concatenate([levels, np.zeros((deepest - len(levels), 2))])
        drafted, right = np.array(depths), np.minimum(np.array(tokens) - 1, depths)
        levels[:, 0] += _more_than(np.minimum(right, drafted - 1), len(levels))
        levels[:, 1] += _more_than(right - 1, len(levels))
        self.seen[source] = levels

    def levels(self, source: Source, depth: int) -> list[tuple[float, float]]:
        """Of the first levels: rows that reached it, and rows that were right."""
        seen = self.seen.get(source)
        found = [] if seen is None else [(reached, right) for reached, right in seen[:depth].tolist()]
        return found + [(0.0, 0.0)] * (depth - len(found))

    def chance(self, source: Source, level: int, prior: float, weight: float) -> float:
        """Of this level, counted from 0."""
        return chance(self.levels(source, level + 1)[level], prior, weight)

    def assume(self, source: Source, depth: int, chance: float, rows: float) -> None:
        """Count so many rows, of which this share was right at every level."""
        reached = rows * chance ** np.arange(depth)
        self.seen[source] = np.stack([reached, reached * chance], axis=1)

    def forget(self, drafter: str) -> None:
        self.seen = {source: levels for source, levels in self.seen.items() if source[0] != drafter}

    def state(self) -> list[Any]:
        """Plain data."""
        return [[*source, levels.tolist()] for source, levels in self.seen.items()]

    def load_state(self, state: Iterable[Any], drafters: Collection[str]) -> None:
        """Of these drafters alone."""
        self.seen |= {
            (drafter, branching): np.array(levels, dtype=float).reshape(-1, 2)
            for drafter, branching, levels in state
            if drafter in drafters
        }


def chance(seen: tuple[float, float], prior: float, weight: float) -> float:
    """Of a level; the prior counts as much as `weight` rows."""
    reached, right = seen
    return (right + weight * prior) / (reached + weight)


def _more_than(last: np.ndarray, levels: int) -> np.ndarray:
    """[levels]: how many rows' last level, of those they reached or were right at, is this one or beyond."""
    counts = np.bincount(np.clip(last, -1, levels - 1) + 1, minlength=levels + 1)
    return counts[:0:-1].cumsum()[::-1]
