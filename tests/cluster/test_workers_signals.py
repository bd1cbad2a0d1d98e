"""A signal while Ray starts or ends in its thread."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tlt.cluster.workers import HelperThread
from tlt.stopping import GivenUp, stop_request


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_does_not_wait_for_the_call(number: signal.Signals) -> None:
    """The next call begins when this one has returned, and a second signal does not wait for it either."""
    helper, ends, done = HelperThread(), threading.Event(), list[str]()

    def start() -> None:
        os.kill(os.getpid(), number)
        ends.wait(60)
        done.append("start")

    def shut_down() -> None:
        os.kill(os.getpid(), number)
        done.append("end")

    began = time.monotonic()
    with stop_request(60.0) as request:
        with pytest.raises(GivenUp):
            helper.call(start)
        assert done == []
        assert request.number == number
        ends.set()
        with pytest.raises(KeyboardInterrupt):
            helper.call(shut_down)
    helper.call(done.append, "later")
    assert done == ["start", "end", "later"]
    assert time.monotonic() - began < 30
    helper.end()


def test_a_call_returns_its_result_or_raises_its_error() -> None:
    helper = HelperThread()
    assert helper.call(max, 1, 2) == 2
    with pytest.raises(ConnectionError):
        helper.call(_fail)
    assert helper.call(threading.get_ident) == helper.call(threading.get_ident) != threading.get_ident()
    helper.end()


def _fail() -> None:
    raise ConnectionError
