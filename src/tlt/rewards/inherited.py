"""State of a reward process that the user's code and its programs inherit. It is that of a program which the user
starts, as far as the run allows. docs/rewards.md lists the differences."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from tlt.rewards.processes import descendants, kill_descendants
from tlt.stopping import SIGNALS

_SURVIVED = (signal.SIGTERM, signal.SIGHUP)  # SIGINT only between calls, because timeouts of the user may send it
_forking = threading.local()


def make_usual(connection: Connection) -> None:
    """Undo what the start of this process changed for user code. `connection` leads to the driver. The driver has
    blocked the signals of the run (`SIGNALS`), which this function unblocks."""
    multiprocessing.set_start_method(None, force=True)  # it was that of this process, `spawn`
    os.dup2(sys.stdin.fileno(), 0)  # multiprocessing has emptied `sys.stdin`, but programs would read the terminal
    os.set_inheritable(connection.fileno(), False)  # a program that outlives this process would keep it open
    atexit.register(_kill_own_descendants)  # exit handlers that are registered later run before
    _handle_signals(connection)


def _handle_signals(connection: Connection) -> None:
    """Survive signals that all processes of the run receive, because the run ends after its current step. They are not
    ignored, because programs would inherit that, and could not be terminated. Forked processes get the former
    handlers."""
    formers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}  # drops those that are pending
    for number, former in formers.items():
        survives = number in _SURVIVED and former is not signal.SIG_IGN
        signal.signal(number, _survive if survives else former)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=partial(_leave, connection, formers))


def ignore_interrupts() -> Any:
    """Ignore SIGINT, because no call of the user's code is running. Return its handler."""
    return signal.signal(signal.SIGINT, signal.SIG_IGN) or signal.SIG_DFL  # None is a handler that is not Python's


def _survive(number: int, frame: FrameType | None) -> None:
    """Ignore a signal. If this process has started programs, which may have received it too, end instead, so that the
    call is repeated in a new process."""
    if descendants(os.getpid()) or resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss:
        _kill_own_descendants()
        os._exit(128 + number)


def _block() -> None:
    """Block signals during a fork. A new process would lose a signal that it receives before `_leave`."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SURVIVED)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _leave(connection: Connection, formers: Mapping[signal.Signals, Any]) -> None:
    """Make a forked process of the user independent of the reward process."""
    connection.close()
    atexit.unregister(_kill_own_descendants)
    for number in _SURVIVED:
        if signal.getsignal(number) is _survive:
            signal.signal(number, formers[number])
    _unblock()


def _kill_own_descendants() -> None:
    kill_descendants(os.getpid())
