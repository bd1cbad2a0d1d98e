"""Allocation of a rollout's rows: the rows of each worker, the queue of waiting rows, and rows that move."""

from __future__ import annotations

import math
from collections import deque

from tlt.cluster.balance import Forecast, half_of, take
from tlt.cluster.crew import Crew
from tlt.cluster.share import Share
from tlt.cluster.worker import Slice
from tlt.types import Response, RolloutStats, Row


class Allocation:
    """Allocation of a rollout's rows (requests with their tokens so far) to workers. Each worker decodes its share. A
    worker whose share is empty takes rows from the queue, or from another worker if the queue is empty. `slots`:
    maximum number of rows of a worker. `forecast` predicts whether moving rows saves time."""

    def __init__(self, crew: Crew, slots: int, forecast: Forecast) -> None:
        self.crew, self.slots, self.forecast = crew, slots, forecast
        self.begin(0)

    def begin(self, missing: int) -> None:
        """Begin a rollout of `missing` responses."""
        self.missing = missing
        """number of responses of the rollout that have not finished"""
        self.queue: deque[list[Row]] = deque()
        self.shares = [Share() for _ in range(self.crew.size)]
        self._lost_stats = RolloutStats()

    def take_rows(self, index: int) -> list[Row]:
        """Move rows to the share of worker `index`: rows that another worker released for it, and rows of the queue up
        to its fair part. Return the moved rows."""
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
            self._promise(share.helper, done.released)
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
            if not self.forecast.is_worth_helping(live, wanted, accept_length):
                return False
        most.asked, most.helper = list(wanted), index
        return True

    def _promise(self, helper: int | None, rows: list[Row]) -> None:
        if helper is not None and helper in self.crew.ready:
            self.shares[helper].promised += rows
            self.crew.break_off()
        elif rows:
            self.requeue(rows)

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
