"""Which worker decodes what: what it is given as its slots fall free, and whether an idle worker helps another.

Pure arithmetic; no token depends on any of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from tlt.trace import AHEAD, IDLE, SPOT

T = TypeVar("T")

_DECAY = 0.97  # factor on earlier measurements of rounds, for each slice
_LEAST_SAVING = 0.2  # seconds that help must save to be worth its trouble
_MEASURED_FOR = 5.0  # seconds of measurement that weigh as much as the initial value of what training costs
_LENGTHS = 1000  # finished responses remembered


class RoundTime:
    """t(rows), the seconds of a round: a line fitted to the slices so far, in which late ones weigh more."""

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
    """What is known of lengths and speed, and what an idle worker would gain by helping."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.round_time = RoundTime()
        self.prefill_seconds = 0.0
        """seconds to prefill a token"""
        self.lengths: deque[int] = deque(maxlen=_LENGTHS)

    def remaining(self, tokens: int) -> float:
        """Expected number of tokens still to come of a response of so many tokens: the mean over finished responses
        that were longer. Without any, the response is expected to double, up to the longest."""
        longer = [length for length in self.lengths if length > tokens]
        return (fmean(longer) if longer else min(self.longest, 2 * tokens + 1)) - tokens

    def rounds(self, live: Mapping[int, int], accept_length: float) -> float:
        """Expected number of rounds until the last of a worker's rows (seed -> tokens so far) ends."""
        return max((self.remaining(tokens) for tokens in live.values()), default=0.0) / max(1.0, accept_length)

    def seconds_left(self, live: Mapping[int, int], accept_length: float) -> float:
        """Expected seconds until then, if nobody helps."""
        return self.rounds(live, accept_length) * self.round_time(len(live))

    def helping(self, live: Mapping[int, int], moved: Sequence[int], accept_length: float) -> float:
        """Seconds by which the rollout ends earlier if the rows `moved` go from this worker to another: remaining
        rounds x (t(rows) - t(rows of the one that has more then)), less the prefill of the tokens that they have."""
        saved = self.round_time(len(live)) - self.round_time(max(len(moved), len(live) - len(moved)))
        return self.rounds(live, accept_length) * saved - self.prefill_seconds * sum(live[seed] for seed in moved)

    def is_worth_helping(
        self, live: Mapping[int, int], moved: Sequence[int], accept_length: float, training: float
    ) -> bool:
        """Whether helping saves more than `training`, the seconds that training instead is predicted to save in the
        rollouts to come."""
        return self.helping(live, moved, accept_length) > max(training, _LEAST_SAVING)


class Beside:
    """Measures what a second of training takes from workers that decode beside it: how much longer their rounds are
    than beside a worker that rests or decodes ahead. It also counts how long workers decoded: the rest of a rollout is
    idle."""

    def __init__(self, second_costs: float) -> None:
        """`second_costs`: the value until it was measured for a while."""
        self._before, self._decoding = second_costs, 0.0
        self._seconds = {True: 0.0, False: 0.0}  # seconds of slices, by whether a worker trained meanwhile
        self._expected = {True: 0.0, False: 0.0}

    def decoded(self, states: Sequence[str], seconds: float, expected: float, prefill: float = 0.0) -> None:
        """A slice took `seconds` beside those of its `prefill`, where `expected` is the mean for such rounds. `states`
        are those of all workers."""
        self._decoding += seconds + prefill
        training = SPOT in states
        if training or IDLE in states or AHEAD in states:
            for kept, new in ((self._seconds, seconds), (self._expected, expected)):
                kept[training] = _DECAY * kept[training] + new

    def begin(self) -> None:
        """A rollout begins."""
        self._decoding = 0.0

    def idle_seconds(self, worker_seconds: float) -> float:
        """How many of `worker_seconds`, the seconds of this rollout summed over workers, were idle."""
        return max(0.0, worker_seconds - self._decoding)

    @property
    def second_costs(self) -> float:
        least = min(self._expected.values())
        if least <= 0:
            return self._before
        training, resting = (self._seconds[trains] / self._expected[trains] for trains in (True, False))
        measured = min(1.0, max(0.0, training / max(resting, 1e-9) - 1))
        return (least * measured + _MEASURED_FOR * self._before) / (least + _MEASURED_FOR)


def half_of(live: Mapping[int, int]) -> list[int]:
    """Seeds of every second row by length, without the longest, so that both sides have long and short rows."""
    return sorted(live, key=lambda seed: -live[seed])[1::2]


def take(queue: deque[list[T]], load: int, fair: int, slots: int) -> list[T]:
    """What a worker with `load` requests gets of the waiting groups: whole groups, as long as it has less than its fair
    share and they fit into its slots. A group that does not fit is split as soon as an eighth of the slots is free."""
    taken: list[T] = []
    while queue and load + len(taken) < fair and load + len(taken) + len(queue[0]) <= slots:
        taken += queue.popleft()
    if queue and not taken and load < fair and slots - load >= max(1, slots // 8):
        taken, queue[0] = queue[0][: slots - load], queue[0][slots - load :]
    return taken
