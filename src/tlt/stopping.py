"""SIGTERM, SIGHUP (the terminal is gone) and Ctrl-C: the first asks a run to save and stop after its step, or without
it where that takes too long; the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """A run was asked to stop, and did; the message says how to go on."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


def how_to_go_on(done: int, steps: int, folder: str, number: int) -> str:
    """Return the message of a run that was stopped by signal `number`."""
    return (
        f"stopped by {signal.Signals(number).name} and saved after step {done} of {steps} in {folder}: "
        "give the same command with --resume to go on"
    )


class GivenUp(BaseException):
    """A run was asked to stop before its first step, or the step that was under way has not ended in time. No guard
    around a part that may fail shall hold it up."""


class StopRequest:
    def __init__(self, patience: float) -> None:
        """`patience`: seconds that the step has from the first signal on."""
        self.patience = patience
        self.number = 0
        """of the signal that came; 0 while none has"""
        self.begun = False
        """whether there may be something to save; before, the first signal ends the run at once"""
        self.over = False
        """whether the run ends by itself already, by whatever cause: signals are noted alone"""
        self.acknowledge: Callable[[str], None] = lambda text: None
        """shows at once that the first signal came; called in a signal handler"""
        self.amid_update: Callable[[], bool] = lambda: False
        """whether the state cannot be saved at this moment; then the step gets the same time once more"""
        self._more = 1

    def __bool__(self) -> bool:
        return self.number != 0

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
        if self.over:
            return
        if not self.begun:
            raise GivenUp
        signal.setitimer(signal.ITIMER_REAL, self.patience)
        self.acknowledge(
            f"{signal.Signals(number).name}: this step has {self.patience:g} s to end (run.stop_within), twice as many "
            "amid an update; then the run saves and stops. A second signal stops it at once and saves nothing."
        )

    def time_is_up(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            return
        if self._more and self.amid_update():
            self._more -= 1
            signal.setitimer(signal.ITIMER_REAL, self.patience)
        else:
            raise GivenUp

    def step_has_ended(self) -> None:
        """In time."""
        if self.number:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def run_ends(self) -> None:
        """What it still does, such as saving, takes the time that it takes."""
        self.over = True
        self.step_has_ended()


@contextmanager
def stop_request(patience: float) -> Iterator[StopRequest]:
    """Notes the signals of the block, but for those that are to be ignored (nohup). Outside the main thread Python lets
    nobody, and none is ever noted."""
    request = StopRequest(patience)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, request.hear) for number in heard}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, request.time_is_up)
    try:
        yield request
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
