"""Signal handlers of the run. They stay installed although Ray installs its own while it starts and ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tlt.stopping import SIGNALS, GivenUp


@contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Restore the run's signal handlers after the block. If a signal reached only Ray's handlers, call the run's
    handler after the block. If a handler of the run raised an exception in the block, raise it again, because Python
    drops an exception that is raised in a `__del__` or around a fork."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    recorders = {number: _Recorder(handler) for number, handler in before.items() if callable(handler)}
    arrived, failure = set[int](), None
    try:
        for number, recorder in recorders.items():
            signal.signal(number, recorder)
        with unwrap_given_up(), _ignore_silently(), _record_arrivals(arrived):
            yield
    except SystemExit:  # raised by Ray's handler
        arrived.add(signal.SIGTERM)
    except Exception as error:
        failure = error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number, handler in before.items():
        if number in recorders and recorders[number].was_called:
            recorders[number].raise_again()
        elif number in arrived:
            handler(number, None) if callable(handler) else signal.raise_signal(number)
    if failure:
        raise failure


class _Recorder:
    """Signal handler that calls `handler`. It records the call, and the exception that `handler` raised."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler = handler
        self.was_called = False
        self._error: BaseException | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.was_called, self._error = True, None
        try:
            self.handler(number, frame)
        except BaseException as error:
            self._error = error
            raise

    def raise_again(self) -> None:
        if self._error:
            raise self._error


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


@contextmanager
def _ignore_silently() -> Iterator[None]:
    """Hide Python's messages on ignored `SystemExit` and `GivenUp` of signal handlers, which are raised again later."""
    before = sys.unraisablehook

    def report(ignored: sys.UnraisableHookArgs) -> None:
        if not isinstance(ignored.exc_value, SystemExit | GivenUp):
            before(ignored)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def _record_arrivals(arrived: set[int]) -> Iterator[None]:
    """Add to `arrived` the numbers of the signals that arrive in the block, whichever handler they have. Forward them
    to the former wakeup file descriptor, such as that of asyncio."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    outer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(outer)
        with suppress(BlockingIOError):
            numbers = os.read(reader, 4096)
            arrived.update(numbers)
            if outer >= 0:
                os.write(outer, numbers)
        os.close(reader)
        os.close(writer)
