"""State of the engine during a rollout and during a round, and counters."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from tlt.draft.ahead import LookAhead
from tlt.draft.chains import Draft
from tlt.draft.features import FeatureView, Harvester
from tlt.draft.strategy import Strategy
from tlt.engine.kv_cache import TurnStore
from tlt.engine.noise_window import NoiseWindow
from tlt.engine.rows import RowTable
from tlt.engine.runner import Runner
from tlt.engine.sampling_table import BatchSampling, SamplingTable
from tlt.engine.scheduler import Scheduler
from tlt.models.decoder import Decoder
from tlt.types import RolloutStats, Row


@dataclass(frozen=True)
class RolloutState:
    """State of the engine during one rollout."""

    rows: RowTable
    scheduler: Scheduler
    sampling: SamplingTable
    noise: NoiseWindow
    view: FeatureView | None
    harvester: Harvester | None
    ahead: LookAhead
    turns: TurnStore
    runner: Runner
    stats: RolloutStats
    version: int
    """target version, the same for all tokens of a rollout"""

    @property
    def target(self) -> Decoder:
        return self.runner.target


@dataclass(frozen=True)
class Round:
    """State of one round: its strategy, and the active rows as they were before the draft."""

    strategy: Strategy
    rows: tuple[Row, ...]
    lengths: list[int]
    """[B] number of committed tokens of each row in the key-value cache"""
    positions: Tensor
    """[B] position of each row's next token in its response"""
    batch: BatchSampling

    def no_drafts(self) -> list[Draft]:
        """Return an empty draft for each row."""
        return [Draft()] * len(self.rows)


class Clock:
    """Timer of the phases of a round, in seconds."""

    def __init__(self) -> None:
        self.began = time.time()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


TARGET, LOOK_AHEAD = ".", "a"
"""letters in `Row.proposed` for a token that was in no draft, and for an accepted look-ahead token; the letter of a
drafter's token is the first one of the drafter's name"""


def count_row(stats: RolloutStats, row: Row, draft: Draft, taken: int, accepted: int, drafter: str) -> None:
    """Count a row's part of a round: `taken` committed tokens, and the first `accepted` tokens of its draft. Add the
    source of each token to `row.proposed`. For a look-ahead row, `stats` counts only the tokens."""
    right = min(taken, accepted)
    row.proposed += (LOOK_AHEAD if draft.ahead else drafter[:1]) * right + TARGET * (taken - right)
    if row.ahead:
        stats.ahead_tokens += taken
        return
    stats.tokens += taken
    for counts in (stats, row.decoded):
        counts.row_passes += 1
        if draft.tokens:
            counts.count_draft(len(draft.tokens), right, taken, draft.ahead)


def count_depths(stats: RolloutStats, drafter: str, learned: Sequence[tuple[Draft, int]]) -> None:
    """Count to which depth drafts were accepted, and to which depth they were verified: up to the first rejected token.
    `learned`: drafts with the numbers of their accepted tokens."""
    accepted = Counter(n for _, n in learned)
    verified = Counter(min(n + 1, len(draft.tokens)) for draft, n in learned)
    for counts, depths in ((stats.accepted_to, accepted), (stats.verified_to, verified)):
        for depth, count in depths.items():
            key = f"{drafter} {depth}"
            counts[key] = counts.get(key, 0) + count


def draft_counts(row: Row, draft: Draft, taken: int) -> tuple[int, int]:
    """Return a row's numbers of committed tokens and of look-ahead draft tokens in a round, for the tuner. If an
    accepted look-ahead token ends the response, a bonus token is counted after it, and the draft tokens after it are
    not counted. Otherwise these draft tokens would count as rejected."""
    if not draft.ahead:
        return taken, 0
    proposed = len(draft.tokens)
    if 0 < taken <= proposed and draft.tokens[taken - 1] == row.tokens[-1]:
        return taken + 1, taken
    return taken, proposed
