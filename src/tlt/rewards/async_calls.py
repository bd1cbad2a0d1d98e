"""Calls of async functions and methods of the user, in the process of rewards or environments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class AsyncCalls:
    """Event loop for all calls, because clients and semaphores of the user belong to one event loop. At most `at_once`
    calls run at the same time. `limit`: timeout of a call in seconds."""

    def __init__(self, at_once: int, limit: float) -> None:
        self.at_once, self.limit = at_once, limit
        self.runner = asyncio.Runner()
        self._renew_threads()

    def run(self, calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
        """Await all calls together. Return the result of each, or the exception that it raised. A call that takes
        longer than the limit is cancelled, and its result is a TimeoutError."""
        found = self.runner.run(self._all(calls))
        if any(isinstance(one, TimeoutError) for one in found):
            self._renew_threads()
        return found

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
        return await asyncio.gather(*map(self._one, calls), return_exceptions=True)

    async def _one(self, call: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(call, self.limit)
        except TimeoutError:
            raise TimeoutError(f"no answer in {self.limit:g} s") from None

    def _renew_threads(self) -> None:
        """Give `asyncio.to_thread` new threads, one per call. A thread cannot be cancelled, so that of a late call
        would keep its place."""
        self.runner.get_loop().set_default_executor(ThreadPoolExecutor(self.at_once))
