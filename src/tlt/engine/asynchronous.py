"""Engine for concurrent callers. Each caller awaits its own response, and all requests are decoded in one batch."""

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
"""finish reason of an interrupted response"""


class AsyncEngine:
    """Wrapper that runs an engine in a thread of its own. Only this thread uses the engine.

    If nothing is left to decode, the thread calls `when_idle`, for example to train the drafter. `when_idle` gets the
    engine and a function that returns True once `when_idle` must return. After `close`, waiting callers and new calls
    get a RuntimeError.
    """

    def __init__(self, engine: RolloutEngine, when_idle: WhenIdle | None = None) -> None:
        self._engine, self._when_idle = engine, when_idle
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waited_for: dict[int, Future[Response]] = {}
        """future response of each unfinished request, by the request's seed"""
        self._failed = False
        """whether a round has failed since the engine was last started"""
        self._closed, self._lock = False, Lock()  # the lock prevents orders after `close`
        self._thread = Thread(target=self._run, name="tlt-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> Response:
        """Decode a request and return its response. If `interrupt` ends the request, the response has the tokens so
        far. If the caller is cancelled, the request is dropped. Raises ValueError for a request that cannot be decoded,
        or if another unfinished request has the same seed."""
        response: Future[Response] = Future()
        response.set_running_or_notify_cancel()  # a cancelled caller must not affect the others
        try:
            await self._ordered(lambda engine: self._submit(engine, request, response))
            return await asyncio.wrap_future(response)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # the engine was closed concurrently
                self._order(lambda engine: self._withdraw(engine, request.seed, response))
            raise

    async def between_rounds(self, act: Callable[[RolloutEngine], T]) -> T:
        """Call `act` with the engine after the current round, and return its result. If `act` makes the engine drop
        requests, for example by a restart, the callers of these requests get a RuntimeError."""

        def acted(engine: RolloutEngine) -> T:
            try:
                return act(engine)
            finally:
                self._fail_dropped(engine)

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
                raise RuntimeError("the engine was closed: create another one")
            self._orders.put(order)
        return result

    async def interrupt(self) -> list[int]:
        """End all unfinished requests and return their seeds. Their callers get responses with the tokens so far."""
        return await self.between_rounds(self._interrupt)

    def close(self) -> None:
        """End the thread after the current round."""
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
                self._fail(list(self._waited_for), RuntimeError("the engine was closed while it decoded"))
                return
            order()

    def _use_idle_time(self, when_idle: WhenIdle) -> None:
        try:
            when_idle(self._engine, lambda: not self._orders.empty())
        except Exception:
            log.exception("work in idle time failed; continuing without it")
            self._when_idle = None

    def _submit(self, engine: RolloutEngine, request: Request, response: Future[Response]) -> None:
        if request.seed in self._waited_for:
            raise ValueError(f"two active requests have the seed {request.seed}: give each request its own seed")
        if self._failed:
            self._restart()
        engine.submit([request])
        self._waited_for[request.seed] = response

    def _withdraw(self, engine: RolloutEngine, seed: int, response: Future[Response]) -> None:
        """Remove a cancelled request, unless it has ended or its seed now belongs to another caller."""
        if self._waited_for.get(seed) is response:
            del self._waited_for[seed]
            engine.release_requests([seed])

    def _round(self) -> None:
        try:
            for response in self._engine.round():
                self._waited_for.pop(response.request.seed).set_result(response)
        except Exception as error:  # pass the error to all callers and restart the engine
            self._fail(list(self._waited_for), error)
            self._failed = True
            with suppress(Exception):  # if the restart fails, the next request tries again and raises its error
                self._restart()

    def _fail(self, seeds: Iterable[int], error: Exception) -> None:
        for seed in seeds:
            self._waited_for.pop(seed).set_exception(error)

    def _fail_dropped(self, engine: RolloutEngine) -> None:
        if self._waited_for:
            held = {row.request.seed for rows in (engine.rows, engine.waiting) for row in rows}
            why = (
                "the engine was restarted during this request: interrupt or await all requests before you load weights"
            )
            self._fail(self._waited_for.keys() - held, RuntimeError(why))

    def _restart(self) -> None:
        self._engine.start(())
        self._failed = False

    def _interrupt(self, engine: RolloutEngine) -> list[int]:
        left = engine.release_requests(self._waited_for.keys())
        for row in left:
            self._waited_for.pop(row.request.seed).set_result(_so_far(row))
        return [row.request.seed for row in left]


def _so_far(row: Row) -> Response:
    return Response(row.request, row.tokens, row.logprobs, row.full_logprobs, ABORTED, decoded=row.decoded)
