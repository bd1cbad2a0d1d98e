"""Calls of worker methods that have not returned yet, and their timeouts. A worker that exceeds the timeout of its call
counts as lost."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from typing import Any

from tlt.cluster.pool import Handle, Pool

BREAKABLE = ("train_drafter", "evaluate_drafter", "look_ahead", "early_update")
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
        """Start a call of a worker's method. Return its handle."""
        if not self.of_worker(index):
            self.restart_clock(index)
        handle = self.pool.submit(index, method, *arguments)
        self._running[handle] = index, method
        return handle

    def submit_breakable(self, index: int, method: str, *arguments: Any) -> None:
        """Start a call that `break_off` can interrupt. The call's number is added to its arguments."""
        assert method in BREAKABLE, "other calls cannot be interrupted"
        self._number += 1
        self.submit(index, method, *arguments, self._number)

    def break_off(self) -> None:
        """Interrupt all running calls of idle work. They end within a micro-batch or a round."""
        for index in self.workers_in(BREAKABLE):
            self.pool.interrupt(index, self._number)

    def of_worker(self, index: int) -> list[str]:
        """Return the methods of the worker's calls."""
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
