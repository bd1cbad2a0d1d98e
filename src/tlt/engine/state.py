"""State of the engine during a rollout and a round, and its counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from tlt.draft.ahead import LookAhead
from tlt.draft.features import FeatureView, FeatureWindow
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.tree import DraftTree
from tlt.engine.harvest import Harvester
from tlt.engine.noise import NoiseWindow
from tlt.engine.rows import RowTable
from tlt.engine.runner import Runner
from tlt.engine.sampling_table import BatchSampling, SamplingTable
from tlt.engine.scheduler import Scheduler
from tlt.engine.turns import TurnStore
from tlt.types import RolloutStats, Row


@dataclass(frozen=True)
class RolloutState:
    """State that lives as long as a rollout."""

    rows: RowTable
    scheduler: Scheduler
    sampling: SamplingTable
    noise: NoiseWindow
    window: FeatureWindow | None
    view: FeatureView | None
    harvester: Harvester | None
    ahead: LookAhead
    turns: TurnStore
    runner: Runner
    stats: RolloutStats
    version: int
    """Target version, the same for all tokens of a rollout"""


@dataclass(frozen=True)
class Round:
    """State that lives as long as a round: the batch before its draft."""

    strategy: Strategy
    rows: tuple[Row, ...]
    lengths: list[int]
    """[B] number of committed tokens in the cache"""
    positions: Tensor
    """[B] position of the next token in each response"""
    batch: BatchSampling

    def roots(self) -> list[DraftTree]:
        """Return trees without draft tokens."""
        return [DraftTree([row.root]) for row in self.rows]


class Clock:
    """Seconds of the phases of a round."""

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
"""Letters of a token that was in no draft, and of an accepted look-ahead token"""


def source_of(tree: DraftTree, drafter: str) -> str:
    """Return the letter of a draft's source: that of look-ahead, or the first letter of the drafter's name."""
    return LOOK_AHEAD if tree.ahead else drafter[:1]


def count_row(stats: RolloutStats, row: Row, tree: DraftTree, taken: int, right: int, drafter: str) -> None:
    """Count a row's part of a round. For a look-ahead row, only its tokens count."""
    row.proposed += source_of(tree, drafter) * right + TARGET * (taken - right)
    if row.ahead:
        stats.ahead_tokens += taken
        return
    for counts in (stats, row.decoded):
        counts.count(len(tree.tokens) - 1, right, taken, tree.ahead)
    stats.tokens += taken


def count_depth(stats: RolloutStats, drafter: str, tree: DraftTree, path: Sequence[int]) -> None:
    """Count how deep a draft was accepted, and how deep it was verified along the accepted path."""
    accepted = len(path) - 1
    for counts, depth in ((stats.accepted_to, accepted), (stats.verified_to, accepted + (path[-1] in tree.parents))):
        key = f"{drafter} {depth}"
        counts[key] = counts.get(key, 0) + 1


def draft_counts(row: Row, tree: DraftTree, taken: int) -> tuple[int, int]:
    """Return the numbers of committed tokens and of look-ahead draft tokens, for the tuner. A draft token that ends the
    response counts as accepted, although no token of the target follows. The draft tokens after it do not count."""
    proposed = tree.ahead * (len(tree.tokens) - 1)
    if 0 < taken <= proposed and tree.tokens[taken] == row.tokens[-1]:
        return taken + 1, taken
    return taken, proposed


def compare_with_plain(
    stats: RolloutStats,
    plain_seconds: Callable[[int, float], float | None],
    now: Round,
    seconds: float,
    tokens: Sequence[int],
    context: float,
    trees: Sequence[DraftTree],
) -> None:
    """Add the seconds of a round, and the estimated seconds of plain decoding for this rollout's tokens.

    A plain round is its own estimate, so that other work on the machine does not count as a gain. A round whose drafter
    proposed nothing is never slower by plain decoding. If look-ahead rows take part, their share is subtracted.
    """
    own = [count for row, count in zip(now.rows, tokens, strict=True) if not row.ahead]
    if not own:
        return
    plain, of_all_rows = (plain_seconds(rows, context) for rows in (len(own), len(now.rows)))
    if plain is None or of_all_rows is None:
        return
    if all(len(tree.tokens) == 1 for tree in trees):
        same = seconds * (plain / of_all_rows)
        plain = same if now.strategy == PLAIN else min(plain, same)
    known = stats.against_plain
    known["seconds"] = known.get("seconds", 0.0) + seconds
    known["plain_seconds"] = known.get("plain_seconds", 0.0) + plain * (sum(own) / len(own))
