"""Distribution of waiting rows to workers, and prediction whether moving rows to an idle worker shortens the rollout.

This module only computes numbers. They affect the duration of a rollout, never its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeVar

T = TypeVar("T")

_DECAY = 0.97  # factor on the weight of earlier measurements of round times, at each new one
_LEAST_SAVING = 0.2  # predicted saving in seconds above which rows are moved
_LENGTHS = 1000  # number of finished responses whose lengths are kept


class RoundTime:
    """Predicted duration in seconds of a decoding round, as a linear function of its number of rows. The line is fitted
    to all measurements so far; recent ones have larger weights."""

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
    """Predictor of remaining decoding time, from the response lengths and round times measured so far. `longest`:
    maximum length of a response in tokens."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.round_time = RoundTime()
        self.prefill_seconds = 0.0
        """measured seconds of prefill per token"""
        self.lengths: deque[int] = deque(maxlen=_LENGTHS)

    def remaining(self, tokens: int) -> float:
        """Return how many more tokens to expect of an unfinished response that has `tokens` tokens. The expected final
        length is the mean length of those finished responses that are longer than `tokens`. If there are none, it is
        twice `tokens` plus 1, and at most `longest`."""
        longer = [length for length in self.lengths if length > tokens]
        return (fmean(longer) if longer else min(self.longest, 2 * tokens + 1)) - tokens

    def rounds(self, live: Mapping[int, int], accept_length: float) -> float:
        """Return the expected number of rounds until all rows of a worker have finished. `live`: number of tokens so
        far of each row, by seed. `accept_length`: mean number of tokens that a row gains in a round."""
        return max((self.remaining(tokens) for tokens in live.values()), default=0.0) / max(1.0, accept_length)

    def helping(self, live: Mapping[int, int], moved: Sequence[int], accept_length: float) -> float:
        """Return the predicted saving in seconds if a busy worker gives some of its rows to an idle worker. `live`:
        tokens so far of each of its rows, by seed. `moved`: seeds of the rows to give. The saving is the remaining
        rounds x (round time with all rows - round time of the fuller worker after the move), minus the time to prefill
        the moved rows."""
        saved = self.round_time(len(live)) - self.round_time(max(len(moved), len(live) - len(moved)))
        return self.rounds(live, accept_length) * saved - self.prefill_seconds * sum(live[seed] for seed in moved)

    def is_worth_helping(self, live: Mapping[int, int], moved: Sequence[int], accept_length: float) -> bool:
        return self.helping(live, moved, accept_length) > _LEAST_SAVING


def half_of(live: Mapping[int, int]) -> list[int]:
    """Return the seeds of every second row, sorted by decreasing length, beginning with the second longest. If these
    rows move to another worker, both workers have long and short rows. `live`: tokens so far by seed."""
    return sorted(live, key=lambda seed: -live[seed])[1::2]


def take(queue: deque[list[T]], load: int, fair: int, slots: int) -> list[T]:
    """Take groups of waiting items from the front of the queue for a worker that already has `load` items. Return the
    taken items. Whole groups are taken while the worker has fewer than `fair` items and the group fits into its
    `slots`. If the first group does not fit, it is split, provided that at least an eighth of the slots is free."""
    taken: list[T] = []
    while queue and load + len(taken) < fair and load + len(taken) + len(queue[0]) <= slots:
        taken += queue.popleft()
    if queue and not taken and load < fair and slots - load >= max(1, slots // 8):
        taken, queue[0] = queue[0][: slots - load], queue[0][slots - load :]
    return taken
