"""SIGTERM, SIGHUP (the terminal is gone) and Ctrl-C: the first asks a run to save and stop after its step, the second
ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """A run was asked to stop, and has saved; the message says how to go on."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class StopRequest:
    number: int = 0
    """of the signal that came; 0 while none has"""

    def __bool__(self) -> bool:
        return self.number != 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Notes the signals of the block, but for those that are to be ignored (nohup). Outside the main thread Python lets
    nobody, and none is ever noted."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, request) for number in heard}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
