"""Idle work: tasks of a worker without rows, in a fixed order. If interrupted, a task ends within a micro-batch or a
round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

from tlt.build import history_tokens, steps_ahead
from tlt.cluster.allocation import Allocation
from tlt.cluster.calls import BREAKABLE
from tlt.cluster.coming import ComingRequests
from tlt.cluster.crowding import Crowding
from tlt.cluster.drafter_training import METHODS, DrafterTraining
from tlt.cluster.early_update import METHOD as EARLY_UPDATE
from tlt.cluster.early_update import EarlyUpdate
from tlt.cluster.supervisor import Done, Supervisor
from tlt.config import Config
from tlt.trace import ABSENT, AHEAD, EARLY, IDLE, SPOT, Tracer
from tlt.types import Request

_SLICES = 2  # duration of a call of training or look-ahead, in slices (`cluster.slice_seconds`)
_LOCAL_SLICE = 0.02  # maximum slice in seconds of a worker in this process, because the driver waits meanwhile
_HANGS = 30.0  # timeout in seconds for interrupted idle work; a worker that exceeds it is replaced


class IdleWork:
    """Idle work of all workers: early update, drafter training and look-ahead."""

    def __init__(
        self,
        supervisor: Supervisor,
        allocation: Allocation,
        tracers: Sequence[Tracer],
        config: Config,
        training: DrafterTraining,
    ) -> None:
        self.supervisor, self.allocation, self.tracers, self.training = supervisor, allocation, tracers, training
        longest, speculation = math.inf if supervisor.pool.is_concurrent else _LOCAL_SLICE, config.speculation
        self.slice_seconds = min(config.cluster.slice_seconds, longest)
        self.early = EarlyUpdate(supervisor, config.train)
        self.looks_ahead = steps_ahead(speculation) > 0
        self.ahead = ComingRequests(allocation.slots, speculation.look_ahead, history_tokens(speculation))
        self.crowding, self._on_one_machine = Crowding(), config.cluster.address is None
        self.is_on = True
        """whether idle workers do anything"""
        self._trained_last: int | None = None  # worker whose training was the last idle work that was started

    def start(self, index: int) -> None:
        """Start the first possible kind of idle work on a worker without rows: early update, drafter training,
        look-ahead. If it is the only idle worker, it trains and looks ahead in turns. These two rest if they take cores
        from workers that decode."""
        if self.update_early(index) or self.crowding.rests:
            return
        idle = self.allocation.idle()
        looks_first = index == self._trained_last and len(idle) == 1
        self._trained_last = None
        if looks_first and self.decode_ahead(index):
            return
        if self.train(index, idle, _SLICES * self.slice_seconds):
            self._trained_last = index
        elif not looks_first:
            self.decode_ahead(index)

    def update_early(self, index: int) -> bool:
        """Let an idle worker compute a shard of the early update. Return whether there was one."""
        due = self.is_on and self.early.next_call(index, self.allocation.lengths, self.slice_seconds)
        if due:
            self.tracers[index].enter(EARLY)
        return due

    def train(self, index: int, idle: Collection[int], seconds: float) -> bool:
        """Start training or evaluating the drafter on an idle worker for about `seconds`, if the schedule permits.
        `idle`: all idle workers. Return whether a call was started."""
        due = self.is_on and self.training.next_call(index, idle, seconds)
        if due:
            self.tracers[index].enter(SPOT)
        return due

    def decode_ahead(self, index: int) -> bool:
        """Start decoding look-ahead requests on an idle worker. Return whether there were any."""
        looks_ahead = self.looks_ahead and self.is_on
        work = self.ahead.work(index, self.allocation.number, len(self.allocation.idle())) if looks_ahead else None
        if work:
            self.tracers[index].enter(AHEAD)
            self.supervisor.call_idle(index, "look_ahead", work, _SLICES * self.slice_seconds)
        return work is not None

    def for_free_slots(self) -> Sequence[Request] | None:
        """Return the requests of coming steps that a worker decodes in slots that its rows leave free. There are none
        if several workers are present, because others may be idle. Return None if they have not changed since the
        worker's last call."""
        if not (self.looks_ahead and self.is_on and len(self.supervisor.present) == 1):
            return ()
        return self.ahead.for_free_slots()

    def train_longer(self, rollout_seconds: float) -> float:
        """Train the drafter between rollout and update, for `speculation.training.extra` times the rollout's duration.
        Return the seconds that this took."""
        began = time.monotonic()
        until = began + self.training.extra * rollout_seconds
        if until == began:
            return 0.0
        self.train_for(lambda: until - time.monotonic())
        return time.monotonic() - began

    def train_for(self, left: Callable[[], float]) -> None:
        """Train the drafter until the time is over or nothing is due. `left()` returns the seconds left."""

        def ended(done: Done) -> None:
            self.handle(done)
            self.tracers[done.worker].enter(IDLE if done.worker in self.supervisor.present else ABSENT)

        self.training.train_for(left, self.slice_seconds, self.train, ended)

    def handle(self, done: Done) -> None:
        """Pass a call that returned to look-ahead, the early update and drafter training."""
        if done.lost:
            self.ahead.call_ended(done.worker)
        elif done.method == "look_ahead":
            self.ahead.add_slice(done.worker, done.result)
        elif done.method == "decode" and self._on_one_machine:
            others_work = bool(self.supervisor.calls.workers_in(("look_ahead", *METHODS)))
            self.crowding.decoded(done.result.seconds, done.result.waited, others_work)
        self.early.handle_result(done)
        self.training.handle_result(done)

    def handle_kept(self) -> None:
        """Handle the calls that returned while the supervisor was waiting for other calls."""
        for done in self.supervisor.take_kept():
            self.handle(done)

    def end_look_ahead(self) -> None:
        """Interrupt all idle work, and wait until look-ahead has ended, so that all its tokens are known."""
        self.supervisor.break_off()
        self.supervisor.wait_until_ended(("look_ahead",), _HANGS)

    def end_all(self) -> None:
        """Interrupt all idle work, and wait until it has ended. The wait for an early update has no timeout."""
        self.supervisor.break_off()
        self.supervisor.wait_until_ended((EARLY_UPDATE,), math.inf)
        self.supervisor.wait_until_ended((*BREAKABLE, *METHODS), _HANGS)
        self.handle_kept()
