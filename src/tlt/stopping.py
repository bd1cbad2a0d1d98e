"""Handling of SIGTERM, SIGHUP (the terminal was closed) and Ctrl-C. The first signal asks the run to save and stop
after its step, or to abandon the step if it takes too long. The second signal ends the run at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, MappingProxyType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """Exception that ends work because a signal asked for it. The message says what was saved or how to continue."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number, self.exit_code = number, 128 + number


class GivenUp(BaseException):
    """Exception that ends the run because a signal arrived before its first step, or because a step did not end in time
    after a signal. It is a BaseException, so that no `except Exception` catches it."""


class SignalRecord:
    """Record of the first signal. The work checks it and ends early. A second signal raises KeyboardInterrupt."""

    number = 0
    """number of the signal that was received; 0 if none was"""

    def __bool__(self) -> bool:
        return self.number != 0

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    def receive_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number


class StopRequest(SignalRecord):
    def __init__(self, patience: float) -> None:
        """Set the time in seconds that a step has after the first signal (`patience`)."""
        self.patience = patience
        self.begun = False
        """whether the run may have progress to save; until then, the first signal ends the run at once"""
        self.over = False
        """whether the run saves its state or ends; a first signal is then only recorded"""
        self.acknowledge: Callable[[str], None] = lambda text: None
        """function that shows the user a message about the first signal; it is called in the signal handler"""
        self.is_updating: Callable[[], bool] = lambda: False
        """function that returns whether the step has updated the weights, so that the state cannot be saved before the
        step ends; the step then gets `patience` seconds once more"""
        self._more = 1

    def receive_signal(self, number: int, frame: FrameType | None) -> None:
        super().receive_signal(number, frame)
        if not self.begun:
            raise GivenUp
        then = "the run stops when its state is saved"
        if not self.over:
            signal.setitimer(signal.ITIMER_REAL, self.patience)
            then = (
                f"this step has {self.patience:g} s to end (run.stop_within), twice as long "
                "if its weights are already updated; then the run saves and stops"
            )
        self.acknowledge(f"{self.name}: {then}. A second signal stops it at once without saving.")

    def time_is_up(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            return
        if self._more and self.is_updating():
            self._more -= 1
            signal.setitimer(signal.ITIMER_REAL, self.patience)
        else:
            raise GivenUp

    def step_has_ended(self) -> None:
        """Turn off the timer, because the step ended in time."""
        if self.number:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def run_ends(self) -> None:
        """Only record a first signal from now on, because the run ends by itself. Saving takes as long as it needs."""
        self.over = True
        self.step_has_ended()

    @contextmanager
    def unhurried(self) -> Iterator[None]:
        """Turn off the timer, and only record a first signal in the `with` block. The block saves, and takes as long as
        it needs. If it raises, the run ends."""
        self.run_ends()
        yield
        self.over = False


@contextmanager
def stop_request(patience: float) -> Iterator[StopRequest]:
    """Yield a `StopRequest` that handles signals in the `with` block. After the first signal, the current step has
    `patience` seconds to end, or twice as long if it has updated the weights. Before the run has progress to save, the
    first signal ends it at once."""
    request = StopRequest(patience)
    with handled(request.receive_signal, {signal.SIGALRM: request.time_is_up}):
        try:
            yield request
        finally:
            request.step_has_ended()


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handled(handler: Handler, others: Mapping[signal.Signals, Handler] = MappingProxyType({})) -> Iterator[None]:
    """Let `handler` receive SIGTERM, SIGINT and SIGHUP in the `with` block, and `others` further signals. Of the three,
    a signal that the process ignores stays ignored, such as SIGHUP under nohup. Outside the main thread no handler is
    installed, because Python allows signal handlers only there."""
    handlers = {number: handler for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN} | dict(others)
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if is_main}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
