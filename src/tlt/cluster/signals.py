"""Signals while Ray starts, waits and ends. Python runs signal handlers in the main thread alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from tlt.stopping import GivenUp

T = TypeVar("T")
_WAIT = 0.2  # seconds


class HelperThread:
    """Thread in which Ray starts and ends. The main thread waits for it, so a signal reaches the run's handlers at
    once, and Ray does not replace them. Ray's processes end with the thread that started them, so this thread must live
    until Ray has ended. If the process ends earlier, it does not wait for this thread."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[Callable[[], None] | None]()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while call := self._calls.get():
            call()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function in the thread and return its result. If a signal handler raises, the call continues, and
        the next call begins after it."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        while not wait([future], _WAIT).done:  # a signal that comes just before a wait does not end it
            pass
        return future.result()

    def end(self) -> None:
        self._calls.put(None)


@contextmanager
def unwrap_given_up() -> Iterator[None]:
    """Raise `GivenUp`, which ends the run after a signal, instead of a SystemError that it caused in the block. If a
    signal handler raises `GivenUp` while Ray waits, Ray raises a SystemError in its place."""
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, GivenUp):
            raise error.__cause__ from None
        raise
