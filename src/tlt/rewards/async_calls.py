"""Calls of async functions and methods of the user, in the process of rewards or environments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_MORE_THREADS = 32  # threads for `asyncio.to_thread` in addition to one per call; asyncio itself has at most 32
_LATE = "late"
"""name of threads of calls that timed out"""
AT_ONCE = 16
"""largest number of responses in one call of an async or batched function"""
T = TypeVar("T")


class AsyncCalls:
    """Event loop for all calls, because clients and semaphores of the user belong to one event loop.
    `at_once`: largest number of calls that `run` is given. `limit`: timeout of a call in seconds."""

    def __init__(self, at_once: int, limit: float) -> None:
        self.at_once, self.limit = at_once, limit
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # not the loop of the user's plain code
        self._renew_threads()

    def run(self, calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
        """Await all calls together. Return the result of each, or the exception that it raised. A call that takes
        longer than the limit is cancelled, and its result is a TimeoutError."""
        found = self.runner.run(self._all(calls))
        if any(isinstance(one, TimeoutError) for one in found):
            self._renew_threads()
        return found

    def result(self, call: Awaitable[T]) -> T:
        """Await one call and return its result."""
        (found,) = self.run([call])
        if isinstance(found, BaseException):
            raise found
        return found

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
        return await asyncio.gather(*map(self._one, calls), return_exceptions=True)

    async def _one(self, call: Awaitable[T]) -> T | BaseException:
        try:
            return await asyncio.wait_for(_without_exit(call), self.limit)
        except TimeoutError:
            return TimeoutError(f"no answer in {self.limit:g} s")

    def _renew_threads(self) -> None:
        """Give `asyncio.to_thread` new threads. A thread cannot be cancelled, so that of a late call would keep its
        place."""
        name = f"calls {id(self)}"
        for thread in threading.enumerate():
            if thread.name.startswith(name):
                thread.name = _LATE
        self.runner.get_loop().set_default_executor(ThreadPoolExecutor(self.at_once + _MORE_THREADS, name))


async def _without_exit(call: Awaitable[T]) -> T | BaseException:
    """Await a call. Return a SystemExit that it raises, because it would end the event loop with all other calls."""
    try:
        return await call
    except SystemExit as error:
        return error


def outside(call: Coroutine[Any, Any, T]) -> T | BaseException:
    """Run a coroutine that never waits, outside any event loop, so that plain code in it may run one. Return its result
    or the exception that it raised."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    except (Exception, SystemExit) as error:
        return error
    raise AssertionError("the coroutine waits")


def late_threads() -> int:
    """Return the number of threads that still run for calls that timed out."""
    return sum(thread.name == _LATE for thread in threading.enumerate())
