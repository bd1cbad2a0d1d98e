"""Allocation of a rollout's rows: the rows of each worker, and the queue of waiting rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tlt.cluster.supervisor import Supervisor
from tlt.cluster.worker import Slice
from tlt.types import Response, RolloutStats, Row

_REFILL = 8  # a worker takes further rows when an eighth of its slots is free, because each admission costs a prefill


@dataclass
class Share:
    """Rows (requests with their tokens so far) that a worker has to decode in a rollout, and what it has reported."""

    rows: dict[int, Row] = field(default_factory=dict)
    """unfinished rows by seed, in the state in which they were sent to the worker"""
    reported: dict[int, list[int]] = field(default_factory=dict)
    """tokens that the worker has reported for each row since the row was sent to it, by seed"""
    last: Slice | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens so far of each row in `rows`, as the worker last reported."""
        live = self.last.live if self.last else {}
        return tuple(live.get(seed, len(row.tokens)) for seed, row in self.rows.items())


class Allocation:
    """Allocation of a rollout's rows (requests with their tokens so far) to workers. Each worker decodes its share, and
    takes further rows from the queue. `slots`: maximum number of rows of a worker."""

    def __init__(self, supervisor: Supervisor, slots: int) -> None:
        self.supervisor, self.slots = supervisor, slots
        self.number = 0
        """number of the current or last rollout"""
        self.begin(0)

    def begin(self, missing: int) -> None:
        """Begin a rollout of `missing` responses."""
        self.number += 1
        self.missing = missing
        """number of responses of the rollout that have not finished"""
        self.queue = deque[Row]()
        self.shares = [Share() for _ in range(self.supervisor.size)]
        self._lost_stats = RolloutStats()

    def take_rows(self, index: int) -> list[Row]:
        """Move rows from the front of the queue to the share of worker `index`, and return them. With these rows, the
        worker has at most its equal part of the unfinished responses, rounded up. The only worker takes all rows."""
        share = self.shares[index]
        room = self.slots - len(share.rows) if len(self.supervisor.present) > 1 else len(self.queue)
        if room < min(len(self.queue), max(1, self.slots // _REFILL)):
            return []
        fair = math.ceil(self.missing / len(self.supervisor.present))
        count = max(0, min(len(self.queue), room, fair - len(share.rows)))
        new = [self.queue.popleft() for _ in range(count)]
        share.rows |= {row.request.seed: row for row in new}
        return new

    def handle_slice(self, index: int, done: Slice) -> list[Response]:
        """Record the result of a decoding call of worker `index`. Return the responses that finished in this call."""
        share = self.shares[index]
        share.last = done
        for seed, tokens in done.news.items():
            share.reported.setdefault(seed, []).extend(tokens)
        for response in done.responses:
            del share.rows[response.request.seed]
            share.reported.pop(response.request.seed, None)
        return done.responses

    def requeue(self, rows: Sequence[Row]) -> None:
        """Put rows at the front of the queue, and interrupt idle work so that an idle worker can take them."""
        self.queue.extendleft(reversed(rows))
        self.supervisor.break_off()

    def reclaim(self, index: int) -> Share:
        """Put the rows of the lost worker `index` back into the queue, and return the share that it had. Other workers
        decode these rows to the same tokens."""
        lost, self.shares[index] = self.shares[index], Share()
        if lost.rows:
            self.requeue([*lost.rows.values()])
        if lost.last:
            self._lost_stats = self._lost_stats + lost.last.stats
        return lost

    def idle(self) -> list[int]:
        """Return the workers that are ready and have no rows to decode."""
        return [index for index, share in enumerate(self.shares) if not share.rows and index in self.supervisor.ready]

    def lengths(self) -> dict[int, int]:
        """Return the current number of tokens of each unfinished row in the workers' shares, by the request's seed."""
        return {seed: n for share in self.shares for seed, n in zip(share.rows, share.lengths, strict=True)}

    def stats(self) -> list[RolloutStats]:
        """Return decoding counters so far: first the sum over lost workers, then those of each worker."""
        return [self._lost_stats, *(share.last.stats for share in self.shares if share.last)]
