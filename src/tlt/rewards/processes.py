"""Reward processes: their memory and descendants, the log file for what they print, and the state that the user's code
and its programs inherit. That state is the one of a program which the user starts, as far as the run allows.
docs/rewards.md lists the differences."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from tlt.stopping import SIGNALS

_SURVIVED = (signal.SIGTERM, signal.SIGHUP)  # SIGINT only between calls, because timeouts of the user may send it
_forking = threading.local()
_MOST_BYTES = 16 * 2**20  # of a log file


def descendants(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process, including those that left its process group."""
    with suppress(psutil.Error):  # the process has ended
        return psutil.Process(pid).children(recursive=True)
    return []


def kill_descendants(pid: int) -> None:
    for process in descendants(pid):
        with suppress(psutil.Error):
            process.kill()


def memory(pid: int) -> int:
    """Return the memory in bytes that a process and its descendants use. A page that they share counts once."""
    total = 0
    for process in (psutil.Process(pid), *descendants(pid)):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


class Output:
    """Redirected stdout and stderr of this process and of the programs that it starts.

    The output is buffered in a temporary file until the first call for a reward. A log file that is written earlier
    would be deleted with the files of the previous run.
    """

    def __init__(self) -> None:
        self._kept = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as the process
        self._screen = os.dup(2)
        self._to(self._kept.fileno())
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]

    def onto_the_screen(self) -> None:
        """Write all output to the original stderr, because it may explain why the process cannot start."""
        self._pour(self._screen)

    def into(self, log: Path) -> None:
        try:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:  # the run has no folder
            return
        self._pour(file)
        os.close(file)

    def bound(self) -> None:
        """Empty the log file if it is larger than 16 MiB. Other processes may append to it at the same time."""
        if os.fstat(1).st_size > _MOST_BYTES:
            os.ftruncate(1, 0)

    def _pour(self, file: int) -> None:
        """Write the buffered output and all later output to this file descriptor."""
        self._to(file)
        self._kept.seek(0)
        with os.fdopen(os.dup(file), "ab") as out:
            shutil.copyfileobj(self._kept, out)

    def _to(self, file: int) -> None:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(file, number)


# -- the inherited state -----------------------------------------------------------------------------------------------


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
