"""The fault barrier: an error turns it off, and has no other effect."""

from __future__ import annotations

import logging

import pytest

from tlt.spot.faults import FaultBarrier, contained


class Counter(FaultBarrier):
    passes_on = (KeyError,)

    def __init__(self) -> None:
        self.calls = 0

    @contained(-1)
    def divide(self, by: int) -> int:
        self.calls += 1
        return 6 // by

    @contained("nothing")
    def look_up(self, name: str) -> str:
        return {"a": "b"}[name]


def test_after_an_error_each_method_returns_its_default(caplog: pytest.LogCaptureFixture) -> None:
    counter = Counter()
    assert (counter.divide(2), counter.look_up("a")) == (3, "b")
    with caplog.at_level(logging.ERROR):
        assert counter.divide(0) == -1
    assert "the run continues without it" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert (counter.divide(by=2), counter.look_up("a")) == (-1, "nothing")
    assert counter.calls == 2
    assert not counter.is_on
    assert Counter().is_on, "another one is not switched off"


def test_errors_of_the_run_are_raised_again() -> None:
    counter = Counter()
    with pytest.raises(KeyError):
        counter.look_up("c")
    assert counter.is_on
