"""Allocation of a rollout's rows to workers: their shares, and the queue of waiting rows."""

from __future__ import annotations

import math
from collections import deque
from typing import TypeVar

from tlt.cluster.crew import Crew
from tlt.cluster.share import Share
from tlt.cluster.worker import Slice
from tlt.types import Response, RolloutStats, Row

T = TypeVar("T")


class Allocation:
    """State of the rows of a rollout. A worker decodes its share of them. If it has less than its fair share, it takes
    rows from the queue. It has room for `slots` rows."""

    def __init__(self, crew: Crew, slots: int) -> None:
        self.crew, self.slots = crew, slots
        self.begin(0)

    def begin(self, missing: int) -> None:
        """Begin a rollout with this number of responses."""
        self.missing = missing
        """Number of responses that have not ended"""
        self.queue: deque[list[Row]] = deque()
        self.shares = [Share() for _ in range(self.crew.size)]
        self._lost_stats = RolloutStats()

    def take_rows(self, index: int) -> list[Row]:
        """Move rows of the queue to this worker's share. Return them."""
        share = self.shares[index]
        fair = math.ceil(self.missing / len(self.crew.present))
        new = take(self.queue, len(share.rows), fair, self.slots)
        share.rows |= {row.request.seed: row for row in new}
        return new

    def handle_slice(self, index: int, done: Slice) -> list[Response]:
        """Handle a slice that returned. Return the responses that finished in it."""
        share = self.shares[index]
        share.last = done
        for seed, tokens in done.news.items():
            share.reported.setdefault(seed, []).extend(tokens)
        for response in done.responses:
            del share.rows[response.request.seed]
            share.reported.pop(response.request.seed, None)
        return done.responses

    def requeue(self, rows: list[Row]) -> None:
        """Put rows at the front of the queue, and end idle work, so that a worker takes them."""
        self.queue.appendleft(rows)
        self.crew.break_off()

    def reclaim(self, index: int) -> Share:
        """Queue the rows of a lost worker again, and return its former share. Other workers decode the rows to the same
        tokens."""
        lost, self.shares[index] = self.shares[index], Share()
        if lost.rows:
            self.requeue(list(lost.rows.values()))
        if lost.last:
            self._lost_stats = self._lost_stats + lost.last.stats
        return lost

    def idle(self) -> list[int]:
        """Return the workers that have nothing to decode."""
        return [index for index, share in enumerate(self.shares) if not share.rows and index in self.crew.sound]

    def lengths(self) -> dict[int, int]:
        """Return the number of tokens of each unfinished row, by seed."""
        return {seed: n for share in self.shares for seed, n in zip(share.rows, share.lengths, strict=True)}

    def stats(self) -> list[RolloutStats]:
        """Return the counters of each present worker that decoded, and before them those of lost ones."""
        return [self._lost_stats, *(share.last.stats for share in self.shares if share.last)]


def take(queue: deque[list[T]], load: int, fair: int, slots: int) -> list[T]:
    """Take waiting groups for a worker that has `load` requests: whole groups, while it has less than its fair share
    and they fit into its slots. A group that does not fit is split if an eighth of the slots is free."""
    taken: list[T] = []
    while queue and load + len(taken) < fair and load + len(taken) + len(queue[0]) <= slots:
        taken += queue.popleft()
    if queue and not taken and load < fair and slots - load >= max(1, slots // 8):
        taken, queue[0] = queue[0][: slots - load], queue[0][slots - load :]
    return taken
