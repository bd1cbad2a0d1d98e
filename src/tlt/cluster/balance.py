"""Assignment of rows to workers, and the prediction whether moving rows to an idle worker saves time.

This module is pure arithmetic. No token depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeVar

T = TypeVar("T")

_DECAY = 0.97  # factor on earlier measurements of rounds, for each slice
_LEAST_SAVING = 0.2  # smallest saving in seconds for which rows are moved
_LENGTHS = 1000  # number of finished responses that are kept


class RoundTime:
    """Seconds of a round as a function of its rows: a line fitted to the slices so far, with larger weights for recent
    ones."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # decayed sums of 1, x, y, xx, xy

    def add(self, rows: float, seconds: float) -> None:
        terms = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [_DECAY * old + new for old, new in zip(self._sums, terms, strict=True)]

    def __call__(self, rows: float) -> float:
        n, x, y, xx, xy = self._sums
        if n == 0:
            return 0.0
        variance = n * xx - x * x
        slope = max(0.0, (n * xy - x * y) / variance) if variance > 1e-6 * n * xx else 0.0
        return max(0.0, (y - slope * x) / n + slope * rows)


class Forecast:
    """Lengths and speeds measured so far, and the gain from moving rows to an idle worker."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.round_time = RoundTime()
        self.prefill_seconds = 0.0
        """seconds to prefill one token"""
        self.lengths: deque[int] = deque(maxlen=_LENGTHS)

    def remaining(self, tokens: int) -> float:
        """Return the expected number of remaining tokens of a response with this many tokens: the mean over finished
        responses that were longer. If there are none, the response is expected to double, up to the longest."""
        longer = [length for length in self.lengths if length > tokens]
        return (fmean(longer) if longer else min(self.longest, 2 * tokens + 1)) - tokens

    def rounds(self, live: Mapping[int, int], accept_length: float) -> float:
        """Return the expected number of rounds until all rows in `live` (seed -> tokens so far) have ended."""
        return max((self.remaining(tokens) for tokens in live.values()), default=0.0) / max(1.0, accept_length)

    def helping(self, live: Mapping[int, int], moved: Sequence[int], accept_length: float) -> float:
        """Return the seconds by which the rollout ends earlier if the rows `moved` go from this worker to another:
        remaining rounds x (t(rows) - t(rows of the fuller worker after the move)), minus the prefill of the moved
        tokens."""
        saved = self.round_time(len(live)) - self.round_time(max(len(moved), len(live) - len(moved)))
        return self.rounds(live, accept_length) * saved - self.prefill_seconds * sum(live[seed] for seed in moved)

    def is_worth_helping(self, live: Mapping[int, int], moved: Sequence[int], accept_length: float) -> bool:
        return self.helping(live, moved, accept_length) > _LEAST_SAVING


def half_of(live: Mapping[int, int]) -> list[int]:
    """Return the seeds of every second row by length, beginning with the second longest. Both workers then have long
    and short rows."""
    return sorted(live, key=lambda seed: -live[seed])[1::2]


def take(queue: deque[list[T]], load: int, fair: int, slots: int) -> list[T]:
    """Take waiting groups for a worker that has `load` requests: whole groups, while it has less than its fair share
    and they fit into its slots. A group that does not fit is split if an eighth of the slots is free."""
    taken: list[T] = []
    while queue and load + len(taken) < fair and load + len(taken) + len(queue[0]) <= slots:
        taken += queue.popleft()
    if queue and not taken and load < fair and slots - load >= max(1, slots // 8):
        taken, queue[0] = queue[0][: slots - load], queue[0][slots - load :]
    return taken
