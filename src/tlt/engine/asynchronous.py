"""An engine for callers who come one by one: each awaits its own response, and all are decoded in one batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

from tlt.engine.protocol import RolloutEngine
from tlt.types import Request, Response, Row

log = logging.getLogger(__name__)
T = TypeVar("T")
WhenIdle = Callable[[RolloutEngine, Callable[[], bool]], None]

ABORTED = "aborted"
"""the finish reason of a response that was interrupted"""


class AsyncEngine:
    """Decodes in a thread of its own, which alone touches the engine.

    `when_idle` is called there with the engine, when there is nothing left to decode, and with what says that it is to
    come back; it may train the drafter meanwhile. After `close` whoever waits is told, and all that is asked raises
    RuntimeError.
    """

    def __init__(self, engine: RolloutEngine, when_idle: WhenIdle | None = None) -> None:
        self._engine, self._when_idle = engine, when_idle
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waited_for: dict[int, Future[Response]] = {}
        """by seed"""
        self._failed = False
        """in a round, and the engine has not begun anew since"""
        self._closed, self._lock = False, Lock()  # nothing is put behind the last order
        self._thread = Thread(target=self._run, name="tlt-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> Response:
        """Its response, or what there was of it when it was interrupted. Raises ValueError for a request that can never
        run, or whose seed another one under way has. A caller who is cancelled takes the request back."""
        response: Future[Response] = Future()
        response.set_running_or_notify_cancel()  # a caller who gives up does not disturb the others
        try:
            await self._ordered(lambda engine: self._submit(engine, request, response))
            return await asyncio.wrap_future(response)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # closed meanwhile
                self._order(lambda engine: self._withdraw(engine, request.seed, response))
            raise

    async def between_rounds(self, act: Callable[[RolloutEngine], T]) -> T:
        """Do this with the engine after the round under way. Requests under way that the engine has lost then, as it
        has when it was started anew, raise RuntimeError where they are awaited."""

        def acted(engine: RolloutEngine) -> T:
            try:
                return act(engine)
            finally:
                self._tell_of_the_lost(engine)

        return await self._ordered(acted)

    async def _ordered(self, act: Callable[[RolloutEngine], T]) -> T:
        return await asyncio.wrap_future(self._order(act))

    def _order(self, act: Callable[[RolloutEngine], T]) -> Future[T]:
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()

        def order() -> None:
            try:
                result.set_result(act(self._engine))
            except Exception as error:
                result.set_exception(error)

        with self._lock:
            if self._closed:
                raise RuntimeError("the engine was closed: make another one")
            self._orders.put(order)
        return result

    async def interrupt(self) -> list[int]:
        """All requests end with the tokens that they have by now. Returns their seeds."""
        return await self.between_rounds(self._interrupt)

    def close(self) -> None:
        """After the round under way."""
        with self._lock:
            self._closed = True
            self._orders.put(None)
        self._thread.join()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            if self._orders.empty() and self._engine.busy and not self._failed:
                self._round()
                continue
            if self._orders.empty() and self._when_idle and not self._failed:
                self._use_idle_time(self._when_idle)
            if (order := self._orders.get()) is None:
                self._tell(list(self._waited_for), RuntimeError("the engine was closed while it decoded"))
                return
            order()

    def _use_idle_time(self, when_idle: WhenIdle) -> None:
        try:
            when_idle(self._engine, lambda: not self._orders.empty())
        except Exception:
            log.exception("what was to use idle time failed; going on without")
            self._when_idle = None

    def _submit(self, engine: RolloutEngine, request: Request, response: Future[Response]) -> None:
        if request.seed in self._waited_for:
            raise ValueError(f"two requests under way have the seed {request.seed}: give each its own")
        if self._failed:
            self._begin_anew()
        engine.submit([request])
        self._waited_for[request.seed] = response

    def _withdraw(self, engine: RolloutEngine, seed: int, response: Future[Response]) -> None:
        """Unless it has ended, or the seed is another caller's."""
        if self._waited_for.get(seed) is response:
            del self._waited_for[seed]
            engine.release_requests([seed])

    def _round(self) -> None:
        try:
            for response in self._engine.round():
                self._waited_for.pop(response.request.seed).set_result(response)
        except Exception as error:  # the engine's: whoever waits is told, and the next request finds it empty
            self._tell(list(self._waited_for), error)
            self._failed = True
            with suppress(Exception):  # then the next request is told why
                self._begin_anew()

    def _tell(self, seeds: Iterable[int], error: Exception) -> None:
        for seed in seeds:
            self._waited_for.pop(seed).set_exception(error)

    def _tell_of_the_lost(self, engine: RolloutEngine) -> None:
        if self._waited_for:
            held = {row.request.seed for rows in (engine.rows, engine.waiting) for row in rows}
            why = "the engine was started anew while it decoded this: interrupt it, or wait, before new weights"
            self._tell(self._waited_for.keys() - held, RuntimeError(why))

    def _begin_anew(self) -> None:
        self._engine.start(())
        self._failed = False

    def _interrupt(self, engine: RolloutEngine) -> list[int]:
        left = engine.release_requests(self._waited_for.keys())
        for row in left:
            self._waited_for.pop(row.request.seed).set_result(_so_far(row))
        return [row.request.seed for row in left]


def _so_far(row: Row) -> Response:
    return Response(row.request, row.tokens, row.logprobs, row.full_logprobs, ABORTED, decoded=row.decoded)
