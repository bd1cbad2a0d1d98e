"""How often the target agrees with a draft, counted online: what decides which nodes are worth verifying.

Given the noise, a drafted token's place among its siblings and its lead over the next noisy score say how likely it
is the target's token; log q itself says almost nothing more. So agreement is counted per cell of (kind of guess,
depth, place, lead).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

_EDGES = (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0)
_DEPTHS, _PLACES = 4, 4  # deeper nodes and later siblings share the last cell
_PRIOR_WEIGHT = 4.0
_HALF_LIFE = (
    256  # rounds after which a count is worth half: drafters and targets change, and what looked bad is tried again
)


class Cell(NamedTuple):
    kind: int
    depth: int
    place: int
    lead: int


def cell(kind: int, depth: int, place: int, behind: float, gap: float) -> Cell:
    """`behind`: distance from the best sibling's noisy score; `gap`: lead over the next one. Any `kind` of the
    drafter's."""
    lead = gap if place == 0 else -behind
    return Cell(kind, min(depth, _DEPTHS), min(place, _PLACES - 1), bisect.bisect(_EDGES, lead))


class Calibration:
    def __init__(self) -> None:
        self.counts: dict[Cell, list[float]] = {}  # [seen, agreed]
        self.rounds = 0

    def chance(self, cell: Cell) -> float:
        """P(the target takes this child | its parent is reached): what was counted, with a prior of a few
        pseudo-counts."""
        seen, agreed = self.counts.get(cell, (0.0, 0.0))
        return (agreed + _PRIOR_WEIGHT * _prior(cell)) / (seen + _PRIOR_WEIGHT)

    def observe(self, cells: Sequence[Cell | None], parents: Sequence[int], path: Sequence[int]) -> None:
        """Count one walked tree: each child of a node on the path was taken or not. The root has no cell."""
        reached = set(path)
        for node, where in enumerate(cells):
            if where is not None and parents[node] in reached:
                count = self.counts.setdefault(where, [0.0, 0.0])
                count[0] += 1.0
                count[1] += node in reached

    def next_round(self) -> None:
        self.rounds += 1
        if self.rounds % _HALF_LIFE == 0:
            self.counts = {key: [seen / 2, agreed / 2] for key, (seen, agreed) in self.counts.items() if seen > 0.5}


def _prior(cell: Cell) -> float:
    """For the best sibling a logistic curve in its lead; for the others, what a small lead leaves them."""
    lead = (-6.0, *_EDGES)[cell.lead]
    return 1.0 / (1.0 + math.exp(-lead)) if cell.place == 0 else 0.5 * math.exp(min(0.0, lead)) / cell.place
