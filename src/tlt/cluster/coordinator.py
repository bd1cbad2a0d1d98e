"""Coordinator, which decides what each worker does next. The states of workers (decoding, idle, ...) are in
`tlt.trace`.

It serves one worker or many. It runs in the driver, as one loop that handles worker calls as they return. No token
depends on its decisions, because any worker may decode any request, from the start or from the point where a lost
worker stopped.

    queue of rows ──> decode a slice ──> finished responses ──> rewards
     ^      ^               │ no rows left
     │      │               v
     │      │         idle work (idle.py), until `break_off`: rows are queued again, or the update begins
     │      │           1. drafter training   hidden states of earlier rollouts   ──> drafter, for the next round
     │      │           2. look-ahead         requests of coming steps            ──> drafts, for their rollouts
     │      └── rows of a lost worker
     └── turns that follow a reply of an environment

The rollout waits for all responses, and for replies. The update waits until idle work has ended, and for the rewards.
Nobody waits for drafters and drafts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from tlt.cluster.drafter_training import DrafterTraining, training_of
from tlt.cluster.idle import IdleWork
from tlt.cluster.supervisor import Done, Supervisor
from tlt.cluster.worker import DecodeWork, Slice
from tlt.config import Config
from tlt.draft.strategy import LEARNED
from tlt.environments.episodes import Turns
from tlt.models.device import torch_device
from tlt.trace import ABSENT, AHEAD, COMPARE, IDLE, ROLLOUT, UPDATE, Tracer
from tlt.types import PassCounts, Request, Response, RolloutStats, Row, WorkerNow

_REPLY = 0.02  # seconds between two checks for replies of environments
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
        self.supervisor.calls.break_off()

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

    def stats(self) -> list[RolloutStats]:
        """Return decoding counters so far: first the sum over lost workers, then those of each worker."""
        return [self._lost_stats, *(share.last.stats for share in self.shares if share.last)]


class Coordinator:
    """Driver of the rollouts. `training`: driver of drafter training (default: that of the recipe)."""

    def __init__(
        self,
        supervisor: Supervisor,
        config: Config,
        turns: Turns | None = None,
        training: DrafterTraining | None = None,
    ) -> None:
        self.supervisor, self.turns = supervisor, turns or Turns()
        self.allocation = Allocation(supervisor, config.engine.most_rows(torch_device(config.model).type))
        self.tracers = [Tracer() for _ in range(supervisor.size)]
        self.now: tuple[WorkerNow, ...] = ()
        """State of each worker after the last call that returned. Any thread may read this tuple."""
        self._enter(IDLE)
        self.idle = IdleWork(
            supervisor, self.allocation, self.tracers, config, training or training_of(supervisor, config)
        )
        self._ended, self._pause = time.monotonic(), 0.0  # end of the last rollout; seconds from it to the update
        self._version = 0  # target version
        self._plain = False  # whether this rollout is a comparison with plain decoding

    def _enter(self, state: str) -> None:
        for index, tracer in enumerate(self.tracers):
            tracer.enter(state if index in self.supervisor.present else ABSENT)
        self.now = tuple(WorkerNow(tracer.state) for tracer in self.tracers)

    def _workers_now(self) -> tuple[WorkerNow, ...]:
        return tuple(
            WorkerNow(AHEAD, self.idle.ahead.rows_of(index), self.idle.ahead.steps_of(index))
            if tracer.state == AHEAD
            else WorkerNow(tracer.state, share.lengths)
            for index, (tracer, share) in enumerate(zip(self.tracers, self.allocation.shares, strict=True))
        )

    # -- rollout -------------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[Request], on_response: Callable[[Response], None], coming: Iterable[list[Request]] = ()
    ) -> tuple[list[Response], RolloutStats]:
        began, idle = time.monotonic(), self.idle
        self._begin(len(requests))
        rows = self.turns.begin(requests)
        idle.ahead.begin(coming if idle.looks_ahead and not self.turns.opens else ())
        self.allocation.queue.extend(idle.ahead.in_even_parts(rows, len(self.supervisor.present)))
        responses = self._decode(on_response)
        self._enter(IDLE)
        seconds = time.monotonic() - began
        stats = self._stats(responses)
        idle.training.rollout_ended(seconds, stats.acceptance_rate.get(LEARNED))
        stats.seconds["spot"] = idle.train_longer(seconds)
        stats.drafter_tokens, stats.spot = idle.training.take_tokens(), idle.training.report()
        self._ended = time.monotonic()
        if self._pause > idle.slice_seconds and self.supervisor.pool.is_concurrent:
            for index in self.supervisor.free():
                idle.decode_ahead(index)
        self.now = self._workers_now()
        idle.ahead.end(stats, responses, self._version)
        return responses, stats

    def generate_plain(self, requests: Sequence[Request], on_response: Callable[[Response], None]) -> list[Response]:
        """Decode with plain decoding, for comparison. Idle workers only wait."""
        self.idle.end_all()
        self.idle.is_on, self._plain = False, True
        try:
            self._enter(COMPARE)
            self._begin(len(requests))
            self.allocation.queue.extend(self.turns.begin(requests))
            return self._decode(on_response)
        finally:
            self.idle.is_on, self._plain = True, False
            self._enter(IDLE)

    def _begin(self, missing: int) -> None:
        self.idle.end_look_ahead()
        self.allocation.begin(missing)
        self.idle.handle_kept()

    def _decode(self, on_response: Callable[[Response], None]) -> list[Response]:
        """Decode until all responses of the rollout are finished. Return them."""
        responses: list[Response] = []
        while self.allocation.missing:
            self.supervisor.readmit()
            for index in self.supervisor.free():
                self._next(index)
            self.now = self._workers_now()
            pause = 0.0 if self.supervisor.calls else _REPLY
            ended: list[Response] = []
            for done in self._next_done():
                if done.lost:
                    self._reclaim(done.worker)
                elif done.method == "decode":
                    ended += self.allocation.handle_slice(done.worker, done.result)
                    self.idle.ahead.store_drafts(done.result.drafts)
                self.idle.handle(done)
            finished, rows = self.turns.take(ended, pause)
            if rows:
                self.allocation.requeue(rows)
            self.allocation.missing -= len(finished)
            for response in finished:
                responses.append(response)
                on_response(response)
        return responses

    def _next_done(self) -> list[Done]:
        """Return the worker calls that have returned: at least one, unless replies of environments are awaited."""
        if not self.turns.awaits:
            return self.supervisor.done()
        return self.supervisor.done(_REPLY) if self.supervisor.calls else []

    def _next(self, index: int) -> None:
        """Start the next call of a free worker: decode its share and waiting rows, or do idle work."""
        new = self.allocation.take_rows(index)
        if not self.allocation.shares[index].rows:
            self.tracers[index].enter(COMPARE if self._plain else IDLE)
            self.idle.start(index)
            return
        self.tracers[index].enter(COMPARE if self._plain else ROLLOUT)
        fresh = [row.request for row in new if not row.tokens]
        resumed = [row for row in new if row.tokens]
        coming = self.idle.for_free_slots()
        drafts = [] if self._plain else self.idle.ahead.drafts([*(row.request for row in new), *(coming or ())])
        work = DecodeWork(self.allocation.number, fresh, resumed, drafts, coming, self._plain)
        self.supervisor.call(index, "decode", work, self.idle.slice_seconds)

    def _reclaim(self, index: int) -> None:
        """Queue the rows of a lost worker again. Tokens that the worker had reported become drafts of these rows."""
        lost = self.allocation.reclaim(index)
        for seed, row in lost.rows.items():
            if reported := lost.reported.get(seed):
                self.idle.ahead.store.put_row(replace(row, tokens=[*row.tokens, *reported]), self._version)
        self.tracers[index].enter(IDLE if index in self.supervisor.present else ABSENT)

    def _stats(self, responses: Sequence[Response]) -> RolloutStats:
        """Return the statistics of the rollout over all workers. Tokens and passes are counted from the responses, so
        lost work that was repeated counts once."""
        lost, *found = self.allocation.stats()
        stats = sum(found, start=lost)
        rates = [one.acceptance_rate for one in found]
        names = sorted({name for one in rates for name in one})
        stats.acceptance_rate = {name: fmean(one[name] for one in rates if name in one) for name in names}
        stats.alarms = {name: now for one in found for name, now in one.alarms.items()}
        stats.tokens = sum(response.num_sampled for response in responses)
        for name in vars(PassCounts()):
            setattr(stats, name, sum(getattr(response.decoded, name) for response in responses))
        stats.ahead_tokens = self.idle.ahead.since_last()
        return stats

    # -- update --------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """End all idle work, and free the memory of the engines, because an update follows. Raises ClusterError."""
        self._pause = time.monotonic() - self._ended
        self._enter(UPDATE)
        self.idle.end_all()
        self.idle.training.update_begins()
        self.supervisor.call_all("release")

    def sync(self, version: int) -> None:
        self.supervisor.call_all("sync", version)
        self._version = version
        self._enter(IDLE)
