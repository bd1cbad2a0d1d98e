"""Signals that end a run, and the time that its step has after them."""

from __future__ import annotations

import signal
from collections.abc import Callable

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
