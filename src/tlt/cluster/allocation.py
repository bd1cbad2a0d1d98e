"""Allocation of a rollout's rows: the rows of each worker, the queue of waiting rows, and rows that move to an idle
worker if this is predicted to end the rollout earlier."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeVar

from tlt.cluster.crew import Crew
from tlt.cluster.worker import Slice
from tlt.types import Response, RolloutStats, Row

T = TypeVar("T")

_DECAY = 0.97  # each new measurement of a round time multiplies the weights of earlier ones by this
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
        """Return the expected number of further tokens of an unfinished response that has `tokens` tokens. The expected
        final length is the mean length of the finished responses that are longer than `tokens`. If no finished response
        is longer, the expected length is 2 * `tokens` + 1, and at most `longest`."""
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


@dataclass
class Share:
    """Rows (requests with their tokens so far) that a worker has to decode in a rollout, and what it has reported."""

    rows: dict[int, Row] = field(default_factory=dict)
    """unfinished rows by seed, in the state in which they were sent to the worker"""
    promised: list[Row] = field(default_factory=list)
    """rows that another worker released for this one"""
    asked: list[int] = field(default_factory=list)
    """seeds of rows that the worker must release in its next decode call"""
    helper: int | None = None
    """idle worker that waits for the rows which this worker releases; None if no worker waits"""
    reported: dict[int, list[int]] = field(default_factory=dict)
    """tokens that the worker has reported for each row since the row was sent to it, by seed"""
    last: Slice | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens so far of each row in `rows`, as the worker last reported."""
        live = self.last.live if self.last else {}
        return tuple(live.get(seed, len(row.tokens)) for seed, row in self.rows.items())


class Allocation:
    """Allocation of a rollout's rows (requests with their tokens so far) to workers. Each worker decodes its share. A
    worker whose share is empty takes rows from the queue, or from another worker if the queue is empty. `slots`:
    maximum number of rows of a worker. `forecast` predicts whether moving rows saves time."""

    def __init__(self, crew: Crew, slots: int, forecast: Forecast) -> None:
        self.crew, self.slots, self.forecast = crew, slots, forecast
        self.number = 0
        """number of the current or last rollout"""
        self.begin(0)

    def begin(self, missing: int) -> None:
        """Begin a rollout of `missing` responses."""
        self.number += 1
        self.missing = missing
        """number of responses of the rollout that have not finished"""
        self.queue: deque[list[Row]] = deque()
        self.shares = [Share() for _ in range(self.crew.size)]
        self._lost_stats = RolloutStats()

    def take_rows(self, index: int) -> list[Row]:
        """Move rows to the share of worker `index`, and return them. First come rows that another worker released for
        this worker. Then come rows of the queue, until the worker has its equal part of the unfinished responses."""
        share = self.shares[index]
        fair = math.ceil(self.missing / len(self.crew.present))
        new = [*share.promised, *take(self.queue, len(share.rows) + len(share.promised), fair, self.slots)]
        share.promised = []
        share.rows |= {row.request.seed: row for row in new}
        if not share.rows:
            share.asked, share.helper = [], None
        return new

    def handle_slice(self, index: int, done: Slice) -> list[Response]:
        """Record the result of a decoding call of worker `index`. Return the responses that finished in this call."""
        share = self.shares[index]
        self._update_forecast(share.last, done)
        share.last = done
        for seed, tokens in done.news.items():
            share.reported.setdefault(seed, []).extend(tokens)
        for response in done.responses:
            del share.rows[response.request.seed]
            share.reported.pop(response.request.seed, None)
            self.forecast.lengths.append(len(response.token_ids))
        if not share.asked:  # else this call began before the worker was asked to release rows
            for row in done.released:
                del share.rows[row.request.seed]
                share.reported.pop(row.request.seed, None)
            if share.helper is not None and share.helper in self.crew.ready:
                self.shares[share.helper].promised += done.released
                self.crew.break_off()
            elif done.released:
                self.requeue(done.released)
            share.helper = None
        return done.responses

    def requeue(self, rows: list[Row]) -> None:
        """Put rows at the front of the queue, and interrupt idle work so that an idle worker can take them."""
        self.queue.appendleft(rows)
        self.crew.break_off()

    def ask_for_rows(self, index: int) -> bool:
        """Ask the worker with the most rows to release some of them for the idle worker `index`, if this is predicted
        to end the rollout earlier. Return whether the idle worker now waits for rows."""
        if any(share.helper == index for share in self.shares):
            return True
        most = max(self.shares, key=lambda share: len(share.rows))
        if most.last is None or most.helper is not None or len(most.rows) < 2:
            return False
        if most.last.waiting:
            wanted = most.last.waiting[1::2] or most.last.waiting
        else:
            live, accept_length = most.last.live, most.last.stats.accept_length
            wanted = half_of(live)
            if self.forecast.helping(live, wanted, accept_length) <= _LEAST_SAVING:
                return False
        most.asked, most.helper = list(wanted), index
        return True

    def reclaim(self, index: int) -> Share:
        """Put the rows of the lost worker `index` back into the queue, and return the share that it had. Other workers
        decode these rows to the same tokens."""
        lost, self.shares[index] = self.shares[index], Share()
        if rows := [*lost.rows.values(), *lost.promised]:
            self.requeue(rows)
        if lost.last:
            self._lost_stats = self._lost_stats + lost.last.stats
        return lost

    def idle(self) -> list[int]:
        """Return the workers that are ready and have no rows to decode."""
        return [index for index, share in enumerate(self.shares) if not share.rows and index in self.crew.ready]

    def lengths(self) -> dict[int, int]:
        """Return the current number of tokens of each unfinished row in the workers' shares, by the request's seed."""
        return {seed: n for share in self.shares for seed, n in zip(share.rows, share.lengths, strict=True)}

    def stats(self) -> list[RolloutStats]:
        """Return decoding counters so far: first the sum over lost workers, then those of each worker."""
        return [self._lost_stats, *(share.last.stats for share in self.shares if share.last)]

    def _update_forecast(self, before: Slice | None, now: Slice) -> None:
        had, has = before.stats if before else RolloutStats(), now.stats
        rounds = has.rounds - had.rounds
        prefill = has.seconds["prefill"] - had.seconds.get("prefill", 0.0)
        if rounds:
            rows = (has.row_passes - had.row_passes) / rounds
            self.forecast.round_time.add(rows, (now.seconds - prefill) / rounds)
        if has.prefill_tokens > had.prefill_tokens:
            self.forecast.prefill_seconds = prefill / (has.prefill_tokens - had.prefill_tokens)
