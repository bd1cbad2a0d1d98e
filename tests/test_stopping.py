"""Signals that end a run, and the time that its step has after them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from tlt.stopping import StopRequest, stop_request


@pytest.mark.parametrize("ends", [StopRequest.step_has_ended, StopRequest.run_ends, lambda request: None])
def test_the_time_ends_with_the_step_the_run_and_the_request(ends: Callable[[StopRequest], None]) -> None:
    """Else an alarm would end a save, or a process that has done its work. tests/run/test_run.py tests what it ends."""
    before = [signal.getsignal(number) for number in signal.Signals]
    with stop_request(600.0) as request:
        request.begun = True
        signal.raise_signal(signal.SIGTERM)
        assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600.0
        ends(request)
        if ends is StopRequest.run_ends:
            signal.raise_signal(signal.SIGALRM)
        assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0.0) == (ends.__name__ == "<lambda>")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert [signal.getsignal(number) for number in signal.Signals] == before


@pytest.mark.parametrize("when", ["before", "in", "after"])
def test_a_save_has_no_timer_and_a_signal_before_in_or_after_it_is_kept(when: str) -> None:
    said = list[str]()
    with stop_request(600.0) as request:
        request.begun, request.acknowledge = True, said.append
        for moment in ("before", "in", "after"):
            with request.unhurried() if moment == "in" else nullcontext():
                if moment == when:
                    signal.raise_signal(signal.SIGTERM)
                assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0.0) == (moment == when != "in")
        assert request.name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [("when its state is saved" in text) for text in said] == [when == "in"]


def test_a_run_in_another_thread_has_no_handlers() -> None:
    """Python allows them only in the main thread."""

    def handlers() -> list[object]:
        with stop_request(60.0):
            return [signal.getsignal(number) for number in signal.Signals]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handlers).result() == [signal.getsignal(number) for number in signal.Signals]
