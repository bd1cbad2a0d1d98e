"""The engine's state: what lives as long as a rollout, and as long as a round; and what is counted of both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from tlt.draft.ahead import LookAhead
from tlt.draft.features import FeatureView, FeatureWindow
from tlt.draft.strategy import Strategy
from tlt.draft.tree import DraftTree
from tlt.engine.harvest import Harvester
from tlt.engine.laws import BatchLaw, LawTable
from tlt.engine.noise import NoiseWindow
from tlt.engine.rows import RowTable
from tlt.engine.runner import Runner
from tlt.engine.scheduler import Scheduler
from tlt.types import RolloutStats, Row


@dataclass(frozen=True)
class RolloutState:
    """What lives as long as a rollout."""

    rows: RowTable
    scheduler: Scheduler
    laws: LawTable
    noise: NoiseWindow
    window: FeatureWindow | None
    view: FeatureView | None
    harvester: Harvester | None
    ahead: LookAhead
    runner: Runner
    stats: RolloutStats
    version: int
    """of the target: all of a rollout's tokens are of one"""


@dataclass(frozen=True)
class Round:
    """What lives as long as a round: the batch as it stands before its draft."""

    strategy: Strategy
    rows: tuple[Row, ...]
    lengths: list[int]
    """[B] committed tokens in the cache"""
    positions: Tensor
    """[B] of the next token in each response"""
    batch: BatchLaw

    def roots(self) -> list[DraftTree]:
        """Trees without a draft."""
        return [DraftTree([row.root]) for row in self.rows]


class Clock:
    """Seconds of a round's phases."""

    def __init__(self, for_coming_steps: bool) -> None:
        self.for_coming_steps = for_coming_steps
        self.began = time.time()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


TARGET, LOOK_AHEAD = ".", "a"
"""Letters of a token that no draft held, and of an accepted look-ahead token."""


def source_of(tree: DraftTree, drafter: str) -> str:
    """Return the letter of a draft's source: that of look-ahead, or the first one of the drafter's name."""
    return LOOK_AHEAD if tree.ahead else drafter[:1]


def count_row(stats: RolloutStats, row: Row, tree: DraftTree, taken: int, right: int, drafter: str) -> None:
    """A row's part of a round; of one that is decoded ahead, the tokens alone."""
    row.proposed += source_of(tree, drafter) * right + TARGET * (taken - right)
    if row.ahead:
        stats.ahead_tokens += taken
        return
    for counts in (stats, row.decoded):
        counts.count(len(tree.tokens) - 1, right, taken, tree.ahead)
    stats.tokens += taken


def guesses_of(row: Row, tree: DraftTree, taken: int) -> tuple[int, int]:
    """For the tuner: tokens committed, and how many a look-ahead proposed. One by which the response ends was right,
    though the target's own token does not follow, and what was proposed behind it says nothing."""
    proposed = tree.ahead * (len(tree.tokens) - 1)
    if 0 < taken <= proposed and tree.tokens[taken] == row.tokens[-1]:
        return taken + 1, taken
    return taken, proposed
