"""The run's signal handlers, which Ray replaces while it starts and ends."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from tlt.cluster.signals import keep_signal_handlers
from tlt.stopping import GivenUp, stop_request


class Ignored:
    """Object that sends a signal in `__del__`, where Python ignores errors."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("rays", [True, False])
def test_a_signal_whose_error_is_ignored_is_raised(rays: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's handler receives it, or it arrives before Ray has set one. Ray starts or fails. Python's message about the
    ignored error is not printed."""
    printed = list[Any]()
    monkeypatch.setattr("sys.unraisablehook", printed.append)

    def start() -> None:
        with keep_signal_handlers():
            if rays:
                signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
            Ignored()
            if fails:
                raise ConnectionError

    with stop_request(60.0) as request:
        own = signal.getsignal(signal.SIGTERM)
        with pytest.raises(GivenUp):
            start()
        assert (request.number, signal.getsignal(signal.SIGTERM)) == (signal.SIGTERM, own)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert printed == []


def test_an_error_without_a_signal_is_raised() -> None:
    with pytest.raises(ConnectionError), keep_signal_handlers():
        raise ConnectionError


@pytest.mark.parametrize("rays", [True, False])
def test_a_recorded_signal_is_recorded_once(rays: bool) -> None:
    noted = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:
        with keep_signal_handlers():
            if rays:
                signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == [signal.SIGTERM]


def test_a_wakeup_descriptor_receives_these_signals_too() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    outer, before = signal.set_wakeup_fd(writer), signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with keep_signal_handlers():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
            signal.raise_signal(signal.SIGTERM)
        assert signal.set_wakeup_fd(outer) == writer
        assert os.read(reader, 10) == bytes([signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(reader)
        os.close(writer)
