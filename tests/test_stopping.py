"""Signals that end a run, and the time that its step has after them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tlt.stopping import GivenUp, SignalRecord, StopRequest, recorded_signals, stop_request

PATIENCE = 600.0
OFF = (0.0, 0.0)


@pytest.fixture
def request_to_stop() -> Iterator[StopRequest]:
    """One of a run that has begun, after SIGTERM."""
    with stop_request(PATIENCE) as request:
        request.begun = True
        signal.raise_signal(signal.SIGTERM)
        yield request


def seconds_left() -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


def test_a_step_that_takes_too_long_is_abandoned(request_to_stop: StopRequest) -> None:
    assert 0.0 < seconds_left() <= PATIENCE
    with pytest.raises(GivenUp):
        signal.raise_signal(signal.SIGALRM)


def test_the_time_ends_with_the_step(request_to_stop: StopRequest) -> None:
    request_to_stop.step_has_ended()
    assert signal.getitimer(signal.ITIMER_REAL) == OFF


def test_a_run_that_saves_takes_the_time_that_it_needs(request_to_stop: StopRequest) -> None:
    request_to_stop.run_ends()
    assert signal.getitimer(signal.ITIMER_REAL) == OFF
    signal.raise_signal(signal.SIGALRM)


def test_an_update_under_way_has_the_same_time_again_once(request_to_stop: StopRequest) -> None:
    request_to_stop.is_updating = lambda: True
    request_to_stop.step_has_ended()  # as an alarm that goes off does
    signal.raise_signal(signal.SIGALRM)
    assert 0.0 < seconds_left() <= PATIENCE
    with pytest.raises(GivenUp):
        signal.raise_signal(signal.SIGALRM)


def test_a_signal_before_there_is_something_to_save_ends_the_run() -> None:
    with stop_request(PATIENCE), pytest.raises(GivenUp):
        signal.raise_signal(signal.SIGTERM)


def test_afterwards_the_timer_is_off_and_all_handlers_are_those_before() -> None:
    """Else an alarm would end a process that has done its work."""
    before = [signal.getsignal(number) for number in signal.Signals]
    with stop_request(PATIENCE) as request:
        request.begun = True
        signal.raise_signal(signal.SIGTERM)
    assert signal.getitimer(signal.ITIMER_REAL) == OFF
    assert [signal.getsignal(number) for number in signal.Signals] == before


def test_a_second_signal_ends_the_work_at_once() -> None:
    record = SignalRecord()
    with recorded_signals(record):
        assert not record
        signal.raise_signal(signal.SIGTERM)
        assert record.name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
