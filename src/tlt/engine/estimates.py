"""Measurements of the tuner: seconds of a round, by strategy and bucket, and acceptance rates of drafts, by depth.

This module does not import torch.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tlt.draft.strategy import PLAIN, Strategy

_WINDOW_ROUNDS = 64  # number of rounds whose seconds are kept for each strategy in a bucket
_ENOUGH_ROUNDS = 4  # rounds of a look-ahead strategy before their seconds replace the profile's
_PRIOR_ROUNDS = 4  # number of rounds that the profile counts as, because the first rounds of a strategy may be slow

X = TypeVar("X", bound=float)
_DEEPEST = 64  # depths of a draft whose acceptance is counted
_KEPT = 1 - 1 / 64  # factor on the counts of recent rounds, applied at every round
_KEPT_LASTING = 1 - 1 / 256  # factor on the lasting counts of a source, applied at every round of this source
_PRIOR_ROWS = 2  # number of rows that an assumed acceptance rate counts as
_ROWS_OF_EVALUATION = 8  # number of rows that a new drafter's rate on held-out data counts as


class Bucket(NamedTuple):
    """Class of similar rounds: up to 2 ** `rows` active rows, and up to 256 * 4 ** `context` tokens of mean context."""

    rows: int
    context: int


def bucket_of(rows: int, context: float) -> Bucket:
    return Bucket(max(0, math.ceil(math.log2(rows))), max(0, math.ceil(math.log(max(1.0, context) / 256, 4))))


def interpolate(points: Mapping[X, float], x: float) -> float:
    """Return the value at `x`, by linear interpolation between the points. Beyond the points, return the value of the
    nearest one."""
    below = max((k for k in points if k <= x), default=min(points))
    above = min((k for k in points if k >= x), default=max(points))
    low, high = points[below], points[above]
    return low if above == below else low + (high - low) * (x - below) / (above - below)


class RoundTimes:
    """Start-up profile and medians of timed rounds. `measure()` returns the profile: rows -> strategy -> seconds of a
    round. It is called when the profile is first needed. For numbers of rows that are not in the profile, the seconds
    are interpolated."""

    def __init__(self, measure: Callable[[], Mapping[int, Mapping[Strategy, float]]]) -> None:
        self._measure = measure
        self._took: dict[Bucket, dict[Strategy, deque[float]]] = {}
        self._medians: dict[tuple[Bucket, Strategy], float] = {}
        self._interpolated: dict[tuple[Strategy, int], float] = {}
        self._most_rows: dict[tuple[int, float], int] = {}  # by the arguments of `most_rows`; called every round

    @cached_property
    def profile(self) -> dict[int, dict[Strategy, float]]:
        profile = self._measure()
        del self._measure  # it holds drafters and their key-value cache
        return {rows: dict(profile[rows]) for rows in sorted(profile)}

    def profiled(self, arm: Strategy, rows: int) -> float:
        """Return the seconds of a round with this strategy (arm) and number of rows, by the start-up profile alone."""
        if (arm, rows) not in self._interpolated:
            costs = {profiled: seconds[arm] for profiled, seconds in self.profile.items()}
            self._interpolated[arm, rows] = interpolate(costs, rows)
        return self._interpolated[arm, rows]

    def rounds(self, arm: Strategy, bucket: Bucket) -> int:
        """Return the number of timed rounds that are kept for this arm and bucket."""
        return len(self._took.get(bucket, {}).get(arm, ()))

    def seconds(self, arm: Strategy, bucket: Bucket) -> float:
        """Return the expected seconds of a round with this arm, for the largest number of rows in the bucket."""
        plain = self._medians.get((bucket, PLAIN))
        scale = plain / self.profiled(PLAIN, 2**bucket.rows) if plain else 1.0
        expected, rounds = self.profiled(arm, 2**bucket.rows) * scale, self.rounds(arm, bucket)
        if not rounds or (arm.ahead and rounds < _ENOUGH_ROUNDS):
            return expected  # a limit that looks slow is not tried again, so one slow round could exclude it
        return (rounds * self._medians[bucket, arm] + _PRIOR_ROUNDS * expected) / (rounds + _PRIOR_ROUNDS)

    def share(self, arm: Strategy, rows: int) -> float:
        """Return the seconds of a round with `rows` rows, divided by the seconds with the largest number of rows in the
        same bucket. Both are from the start-up profile."""
        return self.profiled(arm, rows) / self.profiled(arm, 2 ** bucket_of(rows, 0).rows)

    def most_rows(self, rows: int, longer: float) -> int:
        """Return the largest number of rows for which a plain round takes at most `longer` times as long as for `rows`
        rows, by the start-up profile."""
        if (rows, longer) not in self._most_rows:
            more = range(rows, max(rows, *self.profile) + 1)
            most = longer * min(self.profiled(PLAIN, n) for n in more)  # the first timing may be too slow
            self._most_rows[rows, longer] = max([rows, *(n for n in more if self.profiled(PLAIN, n) <= most)])
        return self._most_rows[rows, longer]

    def add_rounds(self, bucket: Bucket, arm: Strategy, seconds: Iterable[float]) -> None:
        """Add the seconds of timed rounds. The caller has scaled them to the largest number of rows in the bucket."""
        took = self._took.setdefault(bucket, {}).setdefault(arm, deque(maxlen=_WINDOW_ROUNDS))
        took.extend(seconds)
        self._medians[bucket, arm] = statistics.median(took)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> list[Any]:
        """Return the timed rounds as plain data for a checkpoint."""
        return [[list(b), list(arm), list(s)] for b, arms in self._took.items() for arm, s in arms.items()]

    def load_state(self, state: Iterable[Any], arms: Iterable[Strategy]) -> None:
        """Load the timed rounds that `state` returned, for these strategies only."""
        known = frozenset(arms)
        for bucket, arm, seconds in state:
            if seconds and (key := Strategy(*arm)) in known:
                self.add_rounds(Bucket(*bucket), key, seconds)


class AcceptanceModel:
    """Estimate of the acceptance rate at each level: the probability that a draft token is accepted if all draft tokens
    before it were. A source is a drafter, or look-ahead. The estimator is that of Kaplan and Meier: a row counts only
    at the levels that it reached. So drafts of all lengths are combined. Older rounds have smaller weights."""

    def __init__(self) -> None:
        self.seen: dict[str, np.ndarray] = {}
        """recent counts per source, [_DEEPEST, 2]: rows that reached each level, and rows whose token there was
        accepted"""
        self._lasting: dict[str, np.ndarray] = {}
        """the first level's counts over more rounds, [1, 2]; aged only in rounds of the source"""

    def age(self) -> None:
        """Reduce the weight of all recent rounds."""
        for levels in self.seen.values():
            levels *= _KEPT

    def add(self, source: str, depths: Sequence[int], tokens: Sequence[int]) -> None:
        """Count the rows of a round. Row i had a draft of `depths[i]` levels and committed `tokens[i]` tokens, bonus
        token included."""
        drafted = np.array(depths)[:, None]
        right, level = np.minimum(np.array(tokens)[:, None] - 1, drafted), np.arange(_DEEPEST)
        counts = np.stack([(level <= np.minimum(right, drafted - 1)).sum(0), (level < right).sum(0)], axis=1)
        self.seen[source] = self.seen.get(source, 0.0) + counts
        self._lasting[source] = _KEPT_LASTING * self._lasting.get(source, 0.0) + counts[:1]

    def lasting(self, source: str, prior: float) -> float:
        """Return the acceptance rate of the first level, from more rounds than `chances` uses. It does not change while
        the source is not used. The assumed rate `prior` counts as 2 rows."""
        return _rates(self._lasting.get(source), 1, prior)[0]

    def chances(self, source: str, depth: int, prior: float) -> list[float]:
        """Return the acceptance rates of the first `depth` levels. `prior` is an assumed rate of the first level, which
        counts as 2 rows. The prior of each further level is the rate of the level before it."""
        return _rates(self.seen.get(source), depth, prior)

    def assume(self, drafter: str, chance: float) -> None:
        """Set the counts of the drafter as if it had drafted for 8 rows with acceptance rate `chance` at each level."""
        reached = _ROWS_OF_EVALUATION * chance ** np.arange(_DEEPEST, dtype=np.float64)
        self.seen[drafter] = np.stack([reached, reached * chance], axis=1)

    def forget(self, drafter: str) -> None:
        self.seen.pop(drafter, None)
        self._lasting.pop(drafter, None)

    def state(self) -> list[Any]:
        """Return the counts as plain data for a checkpoint."""
        none = np.zeros((0, 2))
        both = [(source, seen, self._lasting.get(source, none)) for source, seen in self.seen.items()]
        return [[source, *(levels[levels[:, 0] > 0].tolist() for levels in counts)] for source, *counts in both]

    def load_state(self, state: Iterable[Any], drafters: Collection[str]) -> None:
        """Load the counts that `state` returned, for these drafters only."""
        for drafter, levels, lasting in state:
            if drafter in drafters:
                padded = self.seen[drafter] = np.zeros((_DEEPEST, 2))
                padded[: len(levels)] = np.array(levels).reshape(-1, 2)
                if lasting:
                    self._lasting[drafter] = np.array(lasting)


def _rates(counts: np.ndarray | None, depth: int, prior: float) -> list[float]:
    """Return the acceptance rates of the first `depth` levels, see `AcceptanceModel.chances`."""
    found = list[float]()
    known = counts[:depth].tolist() if counts is not None else [(0.0, 0.0)] * depth
    for reached, right in known:
        prior = (right + _PRIOR_ROWS * prior) / (reached + _PRIOR_ROWS)
        found.append(prior)
    return found
