"""Pool of simulated workers, and their clock, which jumps to the next event. The pool has the interface of
`tlt.cluster.pool.Pool`."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tlt.cluster.pool import LocalPool

_LAST = 1e-9  # seconds below which work has ended

Work = Generator[tuple[float, float], float, Any]
"""Work of a call. It yields (seconds of work, seconds of a part) and receives the seconds that were done: fewer if it
was interrupted, which happens between two parts. It returns the result of the call."""


class Clock:
    """Simulated time in seconds."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let all modules read this clock in the `with` block."""
        with patch.multiple(time, monotonic=self, time=self, perf_counter=self):
            yield


@dataclass
class Call:
    worker: int
    work: Work
    whole: float = 0.0
    """seconds that the work yielded last"""
    left: float = 0.0
    """those that are not done"""
    part: float = math.inf
    has_begun: bool = False
    done: bool = False
    result: Any = None


class SimulatedPool(LocalPool):
    """Pool of simulated workers, which never fail. Their methods return `Work`."""

    def __init__(
        self, workers: Sequence[Any], clock: Clock, latency: float = 0.0, speed: Callable[[int], float] = lambda n: 1.0
    ) -> None:
        """`latency`: seconds before each call begins, with several workers. `speed`: function from the number of
        workers that compute at the same time to the speed of each."""
        self.workers, self.clock, self.latency, self.speed = workers, clock, latency, speed
        self.size, self.is_concurrent = len(workers), len(workers) > 1
        self._numbers = itertools.count()
        self._calls: dict[int, Call] = {}
        self._queues = [deque[Call]() for _ in workers]

    def submit(self, index: int, method: str, *arguments: Any) -> int:
        handle = next(self._numbers)
        self._calls[handle] = Call(index, self._work(index, method, arguments))
        self._queues[index].append(self._calls[handle])
        return handle

    def _work(self, index: int, method: str, arguments: tuple[Any, ...]) -> Work:
        if self.is_concurrent:
            yield self.latency, math.inf
        return (yield from getattr(self.workers[index], method)(*arguments))

    def wait(self, handles: Collection[int], timeout: float | None = None) -> list[int]:
        until = self.clock.now + (math.inf if timeout is None else timeout)
        while True:
            self._begin()
            done = [handle for handle in handles if self._calls[handle].done]
            if done or self.clock.now >= until:
                return done
            self._advance(until)

    def _begin(self) -> None:
        """Begin the first call of each queue, and the next one if it ends at once."""
        for queue in self._queues:
            while queue and not queue[0].has_begun:
                queue[0].has_begun = True
                self._resume(queue[0], None)

    def _resume(self, call: Call, done: float | None) -> None:
        """Tell the work of a call how many seconds are done. It yields further seconds, or ends."""
        try:
            call.whole, call.part = call.work.send(done)  # pyright: ignore[reportArgumentType]
            call.left = call.whole
        except StopIteration as end:
            call.result, call.done = end.value, True
            self._queues[call.worker].popleft()

    def _advance(self, until: float) -> None:
        """Let the clock jump to the next event, or to `until`."""
        running = [queue[0] for queue in self._queues if queue]
        speed = self.speed(len(running))
        seconds = min([until - self.clock.now, *(call.left / speed for call in running)])
        assert seconds < math.inf, "nothing would ever come back"
        self.clock.now += seconds
        for call in running:
            call.left -= seconds * speed
            if call.left <= _LAST:
                self._resume(call, call.whole)

    def interrupt(self, index: int, number: float) -> None:
        self.workers[index].ends = number
        call = self._queues[index][0] if self._queues[index] else None
        if call and call.part < call.left:
            whole = call.part * max(1, math.ceil((call.whole - call.left) / call.part))
            call.whole, call.left = whole, call.left - (call.whole - whole)

    def updated(self, index: int, seconds: float) -> float | None:
        return 0.0

    def result(self, handle: int) -> Any:
        return self._calls.pop(handle).result
