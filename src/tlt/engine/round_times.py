"""Seconds of a round, by strategy and bucket, from the start-up profile and from timed rounds. The tuner uses them.

This module does not import torch.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from tlt.draft.strategy import PLAIN, Strategy

_WINDOW_ROUNDS = 64  # number of rounds whose seconds are kept for each strategy in a bucket
_ENOUGH_ROUNDS = 4  # rounds of a look-ahead strategy before their seconds replace the profile's

X = TypeVar("X", bound=float)


class Bucket(NamedTuple):
    """Class of similar rounds: up to 2 ** `rows` active rows, and up to 256 * 4 ** `context` tokens of mean context."""

    rows: int
    context: int


def bucket_of(rows: int, context: float) -> Bucket:
    return Bucket(max(0, math.ceil(math.log2(rows))), max(0, math.ceil(math.log(max(1.0, context) / 256, 4))))


def interpolate(points: Mapping[X, float], x: float) -> float:
    """Return the value at `x`, by linear interpolation between the points. Beyond them, return the value of the
    nearest."""
    below = max((k for k in points if k <= x), default=min(points))
    above = min((k for k in points if k >= x), default=max(points))
    low, high = points[below], points[above]
    return low if above == below else low + (high - low) * (x - below) / (above - below)


class RoundTimes:
    """Start-up profile and medians of timed rounds. `measure()` returns the profile: rows -> strategy -> seconds of a
    round. It is called when the profile is first needed. Other numbers of rows are interpolated."""

    def __init__(self, measure: Callable[[], Mapping[int, Mapping[Strategy, float]]]) -> None:
        self._measure = measure
        self._took: dict[Bucket, dict[Strategy, deque[float]]] = {}
        self._medians: dict[tuple[Bucket, Strategy], float] = {}
        self._interpolated: dict[tuple[Strategy, int], float] = {}
        self._most_rows: dict[tuple[int, float], int] = {}  # by the arguments of `most_rows`, asked in every round

    @cached_property
    def profile(self) -> dict[int, dict[Strategy, float]]:
        profile = self._measure()
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
        return (rounds * self._medians[bucket, arm] + expected) / (rounds + 1)  # the profile counts as one round

    def share(self, arm: Strategy, rows: int) -> float:
        """Return the seconds of a round with this many rows, relative to a round with the most rows of the same
        bucket."""
        return self.profiled(arm, rows) / self.profiled(arm, 2 ** bucket_of(rows, 0).rows)

    def most_rows(self, rows: int, longer: float) -> int:
        """Return the largest number of rows whose plain round takes at most `longer` times as long as one of `rows`
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
