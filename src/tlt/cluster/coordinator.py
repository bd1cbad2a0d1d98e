"""Coordinator, which decides what each worker does next. The states of workers (decoding, idle, ...) are in
`tlt.trace`.

It runs in the driver, as one loop that handles worker calls as they return. No token depends on its decisions, because
any worker may decode any request, from the start or from the point where another worker stopped.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import fmean

from tlt.build import starting_drafter, steps_ahead
from tlt.cluster.ahead import LookingAhead, by_prompt
from tlt.cluster.allocation import Allocation
from tlt.cluster.balance import Forecast
from tlt.cluster.crew import BREAKABLE, Crew, Done
from tlt.cluster.drafter_training import METHODS, DrafterTraining
from tlt.cluster.early import METHOD as EARLY_UPDATE
from tlt.cluster.early import EarlyUpdate
from tlt.cluster.group_update import GroupUpdate
from tlt.cluster.share import Share
from tlt.cluster.worker import DecodeWork
from tlt.config import Config
from tlt.draft.strategy import LEARNED
from tlt.models.families import decoder_options, read_config
from tlt.rewards.turns import SingleTurn, Turns
from tlt.rl.early import EarlyGroups
from tlt.trace import ABSENT, AHEAD, COMPARE, EARLY, IDLE, ROLLOUT, SPOT, UPDATE, Tracer
from tlt.types import PassCounts, Request, Response, RolloutStats, TrainBatch, WorkerNow

_AHEAD = 2  # duration of a look-ahead call in slices (`cluster.slice_seconds`), after which requests are reassigned
_LAST = 5  # duration of a decode call in slices if the worker has one row, because a call costs some milliseconds
_HANGS = 30.0  # timeout in seconds for interrupted idle work; a worker that exceeds it is replaced
_REPLY = 0.02  # seconds between two checks for replies of environments


class Coordinator:
    def __init__(self, crew: Crew, config: Config, turns: Turns | None = None) -> None:
        self.crew, self.config, self.turns = crew, config, turns or SingleTurn()
        self.allocation = Allocation(crew, config.engine.max_rows, Forecast(config.rollout.max_new_tokens))
        self.tracers = [Tracer() for _ in range(crew.size)]
        self.now: tuple[WorkerNow, ...] = ()
        """State of each worker after the last call that returned. Any thread may read this tuple."""
        self._enter(IDLE)
        self._number = 0  # number of the current or last rollout
        options = decoder_options(read_config(config.model.path))
        drafter = starting_drafter(config, options)
        self.training = DrafterTraining(crew, crew.pool.put, config, options, drafter)
        self.early = EarlyUpdate(crew, config.train)
        self.group_update = GroupUpdate(crew, self.early)
        self.uses_idle_time = True  # whether idle workers update early, train the drafter, look ahead
        self.looks_ahead = steps_ahead(config.speculation) > 0
        speculation = config.speculation
        self.ahead = LookingAhead(config.engine.max_rows, speculation.look_ahead, speculation.look_ahead_tokens)
        self._ended, self._pause = time.monotonic(), 0.0  # end of the last rollout; seconds from it to the update
        self._version = 0  # target version
        self._plain = False  # whether this rollout is a comparison with plain decoding
        self._plain_forecast = Forecast(config.rollout.max_new_tokens)

    def _enter(self, state: str) -> None:
        for index, tracer in enumerate(self.tracers):
            tracer.enter(state if index in self.crew.present else ABSENT)
        self.now = tuple(WorkerNow(tracer.state) for tracer in self.tracers)

    def _workers_now(self) -> tuple[WorkerNow, ...]:
        return tuple(
            WorkerNow(AHEAD, self.ahead.rows_of(index), self.ahead.steps_of(index))
            if tracer.state == AHEAD
            else WorkerNow(tracer.state, share.lengths)
            for index, (tracer, share) in enumerate(zip(self.tracers, self.allocation.shares, strict=True))
        )

    # -- rollout -------------------------------------------------------------------------------------------------------

    def rollout(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None],
        coming: Iterable[list[Request]] = (),
        early: EarlyGroups | None = None,
    ) -> tuple[list[Response], RolloutStats]:
        began = time.monotonic()
        self._begin(len(requests))
        self.early.begin(early)
        rows = self.turns.begin(requests)
        self.ahead.begin(requests, coming if self.looks_ahead and not self.turns.opens else ())
        self.allocation.queue = self.ahead.deal(rows, len(self.crew.present))
        responses = self._decode(on_response)
        self._enter(IDLE)
        seconds = time.monotonic() - began
        stats = self._stats(responses)
        self.training.rollout_ended(seconds, stats.acceptance_rate.get(LEARNED))
        stats.seconds["spot"] = self._spend_extra_time(seconds)
        self._ended = time.monotonic()
        for index in self.crew.free() if self._pause > self.config.cluster.slice_seconds else ():
            if not self._update_early(index):
                self._decode_ahead(index)
        self.now = self._workers_now()
        self.ahead.end(stats)
        return responses, stats

    def generate_plain(self, requests: Sequence[Request], on_response: Callable[[Response], None]) -> list[Response]:
        """Decode with plain decoding, for comparison. Idle workers only take rows of other workers."""
        self._all_back()
        kept = self.allocation.forecast
        self.allocation.forecast, self.uses_idle_time = self._plain_forecast, False
        self._plain = True
        try:
            self._enter(COMPARE)
            self._begin(len(requests))
            self.allocation.queue = deque(by_prompt(self.turns.begin(requests)))
            return self._decode(on_response)
        finally:
            self._plain = False
            self.allocation.forecast, self.uses_idle_time = kept, True
            self._enter(IDLE)

    def _all_back(self) -> None:
        """Interrupt idle work and wait until all workers are free. An early update has no timeout here."""
        self.crew.break_off()
        self.crew.wait_until_ended((EARLY_UPDATE,), math.inf)
        self.crew.wait_until_ended((*BREAKABLE, *METHODS), _HANGS)
        self._handle_kept_calls()

    def _begin(self, missing: int) -> None:
        self._number += 1
        self.crew.break_off()
        self.crew.wait_until_ended(("look_ahead",), _HANGS)  # so that all look-ahead tokens are known
        self.allocation.begin(missing)
        self._handle_kept_calls()

    def _decode(self, on_response: Callable[[Response], None]) -> list[Response]:
        """Decode until all responses of the rollout are finished. Return them."""
        responses: list[Response] = []
        while self.allocation.missing:
            self.crew.readmit()
            for index in self.crew.free():
                self._next(index)
            self.now = self._workers_now()
            ended: list[Response] = []
            for done in self._next_done():
                if done.lost:
                    self._reclaim(done.worker)
                elif done.method == "decode":
                    ended += self.allocation.handle_slice(done.worker, done.result)
                self._handle_idle_work(done)
            finished, rows = self.turns.take(ended, 0.0 if self.crew.calls else _REPLY)
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
            return self.crew.done()
        return self.crew.done(_REPLY) if self.crew.calls else []

    def _handle_kept_calls(self) -> None:
        """Handle the calls that returned while the crew was waiting for other calls."""
        for done in self.crew.take_kept():
            self._handle_idle_work(done)

    def _handle_idle_work(self, done: Done) -> None:
        """Pass a call that returned to look-ahead, the early update and drafter training."""
        if done.lost:
            self.ahead.call_ended(done.worker)
        elif done.method == "look_ahead":
            self.ahead.add_slice(done.worker, done.result)
        self.early.handle_result(done)
        self.training.handle_result(done)

    def _next(self, index: int) -> None:
        """Start the next call of a free worker: decode its share and waiting rows, or do idle work."""
        new, share = self.allocation.take_rows(index), self.allocation.shares[index]
        if not share.rows:
            self._idle(index)
            return
        self.tracers[index].enter(COMPARE if self._plain else ROLLOUT)
        fresh = [row.request for row in new if not row.tokens]
        drafts = [] if self._plain else self.ahead.drafts(row.request for row in new)
        work = DecodeWork(self._number, fresh, [row for row in new if row.tokens], share.asked, drafts, self._plain)
        self.crew.call(index, "decode", work, self._seconds(share))
        share.asked = []

    def _seconds(self, share: Share) -> float:
        """Return the seconds of the worker's next decode call: 0 (one round) if it must release rows for an idle
        worker, more than usual if it has only one row, because a single row cannot be moved."""
        if share.asked:
            return 0.0
        return self.config.cluster.slice_seconds * (1 if len(share.rows) > 1 else _LAST)

    def _idle(self, index: int) -> None:
        """Start the first possible kind of idle work on a worker without rows: take rows of another worker, early
        update, drafter training, look-ahead. While the worker waits for rows, it looks ahead, because look-ahead stops
        within a round."""
        self.tracers[index].enter(COMPARE if self._plain else IDLE)
        waits, most = self.allocation.ask_for_rows(index), self.config.cluster.slice_seconds
        if waits or not (self._update_early(index) or self._train(index, self.allocation.idle(), most)):
            self._decode_ahead(index)

    def _update_early(self, index: int) -> bool:
        """Let an idle worker compute a shard of the early update. Return whether there was one."""
        so_far, seconds = self.allocation.lengths(), self.config.cluster.slice_seconds
        due = self.uses_idle_time and self.early.next_call(index, so_far, seconds)
        if due:
            self.tracers[index].enter(EARLY)
        return due

    def _train(self, index: int, idle: Collection[int], seconds: float) -> bool:
        """Start training or evaluating the drafter on an idle worker for about `seconds`, if the schedule permits.
        `idle`: all idle workers. Return whether a call was started."""
        due = self.uses_idle_time and self.training.next_call(index, idle, seconds)
        if due:
            self.tracers[index].enter(SPOT)
        return due

    def _spend_extra_time(self, rollout_seconds: float) -> float:
        """Train the drafter between rollout and update, for `speculation.training.extra` times the rollout's duration.
        Return the seconds that this took."""
        began = time.monotonic()
        until = began + self.training.extra * rollout_seconds
        if until == began:
            return 0.0

        def ended(done: Done) -> None:
            self._handle_idle_work(done)
            self.tracers[done.worker].enter(IDLE if done.worker in self.crew.present else ABSENT)

        most = self.config.cluster.slice_seconds
        self.training.train_for(lambda: until - time.monotonic(), most, self._train, ended)
        return time.monotonic() - began

    def _decode_ahead(self, index: int) -> bool:
        """Start decoding look-ahead requests on an idle worker. Return whether there were any."""
        looks_ahead = self.looks_ahead and self.uses_idle_time
        work = self.ahead.work(index, self._number, len(self.allocation.idle())) if looks_ahead else None
        if work:
            self.tracers[index].enter(AHEAD)
            self.crew.call_idle(index, "look_ahead", work, _AHEAD * self.config.cluster.slice_seconds)
        return work is not None

    def _reclaim(self, index: int) -> None:
        """Queue the rows of a lost worker again. Tokens that the worker had reported become drafts of these rows."""
        lost = self.allocation.reclaim(index)
        for seed, row in lost.rows.items():
            if reported := lost.reported.get(seed):
                self.ahead.keep_reported(row, [*row.tokens, *reported], self._version)
        self.tracers[index].enter(IDLE if index in self.crew.present else ABSENT)

    def _stats(self, responses: Sequence[Response]) -> RolloutStats:
        """Return the statistics of the rollout over all workers. Tokens and passes are counted from the responses, so
        lost work that was repeated counts once."""
        lost, *found = self.allocation.stats()
        stats = sum(found, start=lost)
        rates = [one.acceptance_rate for one in found]
        names = sorted({name for one in rates for name in one})
        stats.acceptance_rate = {name: fmean(one[name] for one in rates if name in one) for name in names}
        stats.alarms = {name: now for one in found for name, now in one.alarms.items()}
        stats.spot = self.training.report()
        stats.tokens = sum(response.num_sampled for response in responses)
        for name in vars(PassCounts()):
            setattr(stats, name, sum(getattr(response.decoded, name) for response in responses))
        stats.drafter_tokens = self.training.take_tokens()
        stats.ahead_tokens = self.ahead.since_last()
        stats.seconds["early"] = self.early.take_seconds()
        return stats

    # -- update --------------------------------------------------------------------------------------------------------

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """End all idle work, and update the policy on all present workers. Raises ClusterError."""
        self._pause = time.monotonic() - self._ended
        self._enter(UPDATE)
        self._all_back()
        self.training.update_begins()
        return self.group_update.run(batch, step)

    def sync(self, version: int) -> None:
        self.crew.call_all("sync", version)
        self._version = version
        self._enter(IDLE)
