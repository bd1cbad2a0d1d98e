"""Bookkeeping of worker calls that have not returned, of their timeouts, and of workers that are not there. A worker
that exceeds the timeout of its call counts as lost."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from typing import Any

from tlt.cluster.pool import ClusterError, Handle, Pool

log = logging.getLogger(__name__)

BREAKABLE = ("train_drafter", "evaluate_drafter", "look_ahead")
"""methods whose calls can be interrupted; their last argument is the call's number"""
_SHORT = {
    *("decode", "look_ahead", "train_drafter", "evaluate_drafter", "drafter_state", "take_drafter"),
    *("rollout_ended", "forget_older_data", "release", "sync", "trace"),
    *("tuner_state", "load_tuner_state", "rendezvous"),
}
"""Methods whose calls take one slice or move little data. The duration of all other methods grows with the model."""
_LATELY = 5  # number of recent calls of a long method that determine its timeout
_TIMES = 10.0  # timeout of a long method, as a multiple of its longest recent call
_UNKNOWN = 12.0  # timeout of the first call of a long method, relative to `patience`; the call may build the model
_LOG_AFTER = 10.0  # seconds after which a process that has not started is logged
_POLL_EVERY = 1.0  # seconds between two checks whether left-out workers can return
_PAUSE = 30.0  # seconds before a worker that was lost too often is tried again; doubled each time
_LONGEST_PAUSE = 3600.0  # maximum pause in seconds before a lost worker is tried again


class PendingCalls:
    """Calls that have not returned, in order of submission. A worker runs its calls one after another."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._running: dict[Handle, tuple[int, str]] = {}
        self._since = [0.0] * pool.size  # when each worker began its present call
        self._number = 0  # number of the last interruptible call

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, index: int, method: str, *arguments: Any) -> Handle:
        """Start a call of a worker's method. Return its handle. A number is added to the arguments of a call that
        `break_off` can interrupt."""
        if method in BREAKABLE:
            self._number += 1
            arguments = (*arguments, self._number)
        if not self.of_worker(index):
            self.restart_clock(index)
        handle = self.pool.submit(index, method, *arguments)
        self._running[handle] = index, method
        return handle

    def break_off(self) -> None:
        """Interrupt all running calls of idle work. They end within a micro-batch or a round."""
        for index in self.workers_in(BREAKABLE):
            self.pool.interrupt(index, self._number)

    def of_worker(self, index: int) -> list[str]:
        """Return the methods of the worker's calls, in order of submission."""
        return [method for i, method in self._running.values() if i == index]

    def workers_in(self, methods: Collection[str]) -> dict[int, str]:
        """Return a dict from worker to method, for each worker that has a call of one of these methods."""
        return {index: method for index, method in self._running.values() if method in methods}

    def returned(self, timeout: float) -> Iterator[Handle]:
        """Yield the handles of calls that have returned: at least one, unless `timeout` seconds pass first. A call is
        skipped if `forget` or `forget_all_but` removes it in the meantime."""
        for handle in self.pool.wait(list(self._running), timeout):
            if handle in self._running:
                yield handle

    def pop(self, handle: Handle) -> tuple[int, str, float]:
        """Remove a call that has returned. Return its worker, its method, and the seconds that it took."""
        index, method = self._running.pop(handle)
        seconds = self.seconds(index)
        self.restart_clock(index)
        return index, method, seconds

    def seconds(self, index: int) -> float:
        """Return the seconds since the worker began its present call."""
        return time.monotonic() - self._since[index]

    def restart_clock(self, index: int) -> None:
        """Count the seconds of the worker's present call from now on."""
        self._since[index] = time.monotonic()

    def forget(self, index: int) -> None:
        """Remove all calls of a lost worker."""
        self._running = {handle: call for handle, call in self._running.items() if call[0] != index}

    def forget_all_but(self, method: str) -> None:
        """Remove all calls of other methods."""
        self._running = {handle: call for handle, call in self._running.items() if call[1] == method}


class Deadlines:
    """Timeouts of worker calls, by method. `patience`: timeout in seconds of short calls, and minimum timeout of other
    calls."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._taken: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_LATELY))

    def took(self, method: str, seconds: float) -> None:
        """Record that a call of this method took this many seconds."""
        self._taken[method].append(seconds)

    def seconds(self, method: str) -> float:
        """Return the timeout of this method in seconds."""
        if method in _SHORT:
            return self.patience
        taken = self._taken[method]
        return max(self.patience, _TIMES * max(taken)) if taken else _UNKNOWN * self.patience


class Capacity:
    """Workers whose process is awaited, and workers that are left out, because they were lost too often or did not
    start.

    `grace`: timeout in seconds for the start of a worker's process. `least`: minimum number of workers that are not
    left out. With fewer, the run ends.
    """

    def __init__(self, pool: Pool, least: int, grace: float) -> None:
        self.pool, self.least, self.grace = pool, least, grace
        self.awaited = dict.fromkeys(range(pool.size), time.monotonic())
        """time of the request (`time.monotonic`) by worker, for workers whose process has not started yet"""
        self._logged: set[int] = set()  # awaited workers whose delay was logged
        self._absent: dict[int, float] = {}  # left-out worker -> earliest time of its return
        self._next = 0.0

    @property
    def present(self) -> list[int]:
        """Workers that are not left out, ascending. Workers whose process has not started yet are included."""
        return [index for index in range(self.pool.size) if index not in self._absent]

    def awaits(self, index: int) -> None:
        """Record that a new process was requested for this worker, which is then no longer left out."""
        self._absent.pop(index, None)
        self.awaited[index] = time.monotonic()

    def poll(self) -> tuple[list[int], list[int]]:
        """Return two lists of workers: those whose process has started since the last call, and those whose process did
        not start within `grace` seconds."""
        now = time.monotonic()
        begun = [index for index in self.awaited if self.pool.has_begun(index)]
        for index in begun:
            del self.awaited[index]
            self._logged.discard(index)
        for index, since in self.awaited.items():
            if now - since > min(_LOG_AFTER, self.grace) and index not in self._logged:
                self._logged.add(index)
                late = f"worker {index} has not started after {now - since:.0f} s ({self.pool.capacity()})"
                log.warning("%s; its timeout is %g s (cluster.grace)", late, self.grace)
        return begun, [index for index, since in self.awaited.items() if now - since > self.grace]

    def leave_out(self, index: int, why: str, times: int = 0) -> None:
        """Continue the run without worker `index`, for the reason `why`. The worker may return when its process has
        started and a pause is over. `times`: number of losses in a row above the permitted number. The pause is 1 s if
        `times` is 0, and 30 s if it is 1. Each further loss doubles the pause, up to an hour. Raises ClusterError if
        too few workers are left."""
        self.awaited.pop(index, None)
        self._logged.discard(index)
        pause = min(_PAUSE * 2 ** (times - 1), _LONGEST_PAUSE) if times else _POLL_EVERY
        self._absent[index] = time.monotonic() + pause
        left = f"{len(self.present)} of {self.pool.size} workers are left"
        if len(self.present) < self.least:
            raise ClusterError(
                f"{left}, but the run needs {self.least} (cluster.min_workers, or all workers with train.shard): {why}"
            )
        again = f"; worker {index} is tried again in {pause:g} s" if times else ""
        log.warning("%s, and the run continues with them%s: %s", left, again, why)

    def back(self) -> list[int]:
        """Return the left-out workers that can take part in the run again: their process has started, and their pause
        is over. Return [] if the last check was less than a second ago."""
        now = time.monotonic()
        if not self._absent or now < self._next:
            return []
        self._next = now + _POLL_EVERY
        return [i for i, until in self._absent.items() if now > until and self.pool.has_begun(i)]
