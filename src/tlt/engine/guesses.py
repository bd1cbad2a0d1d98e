"""How far a drafter's guesses are right. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

_KEPT = 1 - 1 / 64  # of what was seen, from one round to the next

Kind = tuple[str, int]
"""drafter, branching"""


class Guesses:
    """The chance that a guess is right behind right ones, level by level: Kaplan and Meier's estimate, in which a chain
    that was right to its end says nothing of what would have come behind it. So chains of any depth tell of each other.
    The older a round, the less it counts."""

    def __init__(self) -> None:
        self.seen: dict[Kind, list[list[float]]] = {}
        """of every level: rows that reached it, and rows that were right"""

    def add(self, kind: Kind, depth: int, tokens: Sequence[int]) -> None:
        """A round: `tokens` that each row committed, the target's own one among them."""
        for levels in self.seen.values():
            for level in levels:
                level[0] *= _KEPT
                level[1] *= _KEPT
        levels = self.seen.setdefault(kind, [])
        levels += [[0.0, 0.0] for _ in range(depth - len(levels))]
        for at, level in enumerate(levels[:depth]):
            level[0] += sum(committed > at for committed in tokens)
            level[1] += sum(committed > at + 1 for committed in tokens)

    def _at(self, kind: Kind, level: int) -> Sequence[float]:
        levels = self.seen.get(kind, ())
        return levels[level] if level < len(levels) else (0.0, 0.0)

    def rows(self, kind: Kind, level: int) -> float:
        """That told of this level, counted from 0."""
        return self._at(kind, level)[0]

    def chance(self, kind: Kind, level: int, prior: float, weight: float) -> float:
        """Of this level; the prior counts as much as `weight` rows."""
        reached, right = self._at(kind, level)
        return (right + weight * prior) / (reached + weight)

    def forget(self, drafter: str) -> None:
        self.seen = {kind: levels for kind, levels in self.seen.items() if kind[0] != drafter}

    def state(self) -> list[Any]:
        """Plain data."""
        return [[*kind, [list(level) for level in levels]] for kind, levels in self.seen.items()]

    def load_state(self, state: Iterable[Any], drafters: Collection[str]) -> None:
        """Of these drafters alone."""
        self.seen |= {(drafter, branching): levels for drafter, branching, levels in state if drafter in drafters}
