"""Allocation of a rollout's rows to workers: their shares, the queue of waiting rows, and rows that move."""

from __future__ import annotations

import math
from collections import deque

from tlt.cluster.balance import Forecast, half_of, take
from tlt.cluster.crew import Crew
from tlt.cluster.share import Share
from tlt.cluster.worker import Slice
from tlt.types import Response, RolloutStats, Row


class Allocation:
    """State of the rows of a rollout. A worker decodes its share of them. When it has none left, it takes rows from the
    queue, and then from another worker. A worker has room for `slots` rows."""

    def __init__(self, crew: Crew, slots: int, forecast: Forecast) -> None:
        self.crew, self.slots, self.forecast = crew, slots, forecast
        self.begin(0)

    def begin(self, missing: int) -> None:
        """Begin a rollout with this number of responses."""
        self.missing = missing
        """number of responses that have not ended"""
        self.queue: deque[list[Row]] = deque()
        self.shares = [Share() for _ in range(self.crew.size)]
        self._lost_stats = RolloutStats()

    def take_rows(self, index: int) -> list[Row]:
        """Move rows that wait for this worker, and rows of the queue, to its share. Return them."""
        share = self.shares[index]
        fair = math.ceil(self.missing / len(self.crew.present))
        new = [*share.promised, *take(self.queue, len(share.rows) + len(share.promised), fair, self.slots)]
        share.promised = []
        share.rows |= {row.request.seed: row for row in new}
        if not share.rows:
            share.asked, share.helper = [], None
        return new

    def handle_slice(self, index: int, done: Slice) -> list[Response]:
        """Handle a slice that returned. Return the responses that finished in it."""
        share = self.shares[index]
        self._update_forecast(share.last, done)
        share.last = done
        for seed, tokens in done.news.items():
            share.reported.setdefault(seed, []).extend(tokens)
        for response in done.responses:
            del share.rows[response.request.seed]
            share.reported.pop(response.request.seed, None)
            self.forecast.lengths.append(len(response.token_ids))
        if not share.asked:  # else the slice began before the request to move rows
            for row in done.released:
                del share.rows[row.request.seed]
                share.reported.pop(row.request.seed, None)
            self._promise(share.helper, done.released)
            share.helper = None
        return done.responses

    def requeue(self, rows: list[Row]) -> None:
        """Put rows at the front of the queue. Interrupt idle work, so that an idle worker takes the rows."""
        self.queue.appendleft(rows)
        self.crew.break_off()

    def ask_for_rows(self, index: int) -> bool:
        """Ask the worker with most rows to move some to this idle worker, if that is predicted to end the rollout
        earlier. Return whether the idle worker waits for rows."""
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
        """Queue the rows of a lost worker again, and return its former share. Other workers decode the rows to the same
        tokens."""
        lost, self.shares[index] = self.shares[index], Share()
        if rows := [*lost.rows.values(), *lost.promised]:
            self.requeue(rows)
        if lost.last:
            self._lost_stats = self._lost_stats + lost.last.stats
        return lost

    def idle(self) -> list[int]:
        """Return the workers that have nothing to decode."""
        return [index for index, share in enumerate(self.shares) if not share.rows and index in self.crew.ready]

    def lengths(self) -> dict[int, int]:
        """Return the number of tokens of each unfinished row, by seed."""
        return {seed: n for share in self.shares for seed, n in zip(share.rows, share.lengths, strict=True)}

    def stats(self) -> list[RolloutStats]:
        """Return the sum of the counters of lost workers, then the counters of each worker that decoded."""
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
