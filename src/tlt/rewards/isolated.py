"""Separate process for reward functions and environments of the user. If this code hangs, raises an exception or ends
the process, the verdict names the fault and the run continues.

The user's code and its programs inherit the state of a program which the user starts, as far as the run allows.
docs/rewards.md lists the differences.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from tlt.config import Config
from tlt.rewards.answers import RewardError
from tlt.rewards.scores import make_terms, score_all
from tlt.rewards.user_calls import AT_ONCE, late_threads
from tlt.rewards.verdicts import DIED, Verdict
from tlt.stopping import SIGNALS
from tlt.types import Prompt

START_SECONDS = 120.0  # timeout for the start of a process, which imports the user's module
_GRACE_SECONDS = 1.0  # added to the timeout of a call that may have several responses
_CHECK_SECONDS = 1.0  # time between two checks of the memory and the ended programs of the process
_MOST_LATE = 64  # largest number of threads of calls that timed out; a process with more is replaced
_MOST_ZOMBIES = 64  # largest number of ended programs without a parent that waits; a process with more is replaced
_PR_SET_CHILD_SUBREAPER = 36
_SURVIVED = (signal.SIGTERM, signal.SIGHUP)  # SIGINT only between calls, because timeouts of the user may send it
_forking = threading.local()
_MOST_BYTES = 16 * 2**20  # of a log file


Answering = Callable[[Sequence[tuple[Prompt, Any]]], list[Verdict]]
Open = Callable[[Config, Collection[str]], tuple[Answering, bool]]
"""Function (config, columns of the data) that is called in the new process to load the user's code. It returns the
function that computes verdicts, and whether that function may be called with several responses at once."""


def open_terms(config: Config, columns: Collection[str]) -> tuple[Answering, bool]:
    """Load the reward terms of the recipe. Return a function from a list of (prompt, answer) to verdicts, and whether
    it may be called with several responses at once. Raises RewardError."""
    terms = make_terms(config, columns)
    return partial(score_all, terms), all(term.many for term in terms)


class IsolatedScore:
    """Separate process that runs user code and is kept between calls. If it does not answer in time, it is killed. The
    next call starts a new process. This also happens if many threads of the user's async calls do not end, or if many
    programs have ended that nothing waits for.

    The process is spawned, not forked, because torch's threads do not survive a fork.
    """

    def __init__(
        self, config: Config, log: Path | None = None, columns: Collection[str] = (), opens: Open = open_terms
    ) -> None:
        """Start the process. Its output goes to the file `log`. `columns` are the names of the data's columns. `opens`
        is called in the process to load the user's code. Raises RewardError if the process cannot start."""
        self.config, self.log, self.columns, self.opens = config, log, columns, opens
        self.at_once = 1
        """largest number of responses in one call of `score_all`"""
        self._check_at = 0.0
        self._process: BaseProcess | None = None
        self._start()

    def score_all(self, asked: Sequence[tuple[Prompt, Any]]) -> list[Verdict]:
        """Return a verdict for each response. If the process does not answer a call with several responses, return an
        empty list, because it is not known which response is the cause."""
        if not self.runs:
            self._start()
        limit = self.config.reward.timeout_seconds
        # an async function applies the timeout to each response itself, so that other responses and episodes go on
        patience = limit if self.at_once == 1 else limit + _GRACE_SECONDS
        try:
            self._connection.send(list(asked))
            if self._answers(patience):
                verdicts, goes_on = self._connection.recv()
                if self._is_full or not goes_on:
                    self.kill()
                return [Verdict(*verdict) for verdict in verdicts]
            verdict = Verdict(None, "timeout", f"no answer in {limit:g} s")
        except (EOFError, OSError):
            verdict = DIED
        except MemoryError as error:
            verdict = Verdict(None, "crash", str(error))
        self.kill()
        return [verdict] if len(asked) == 1 else []

    def _answers(self, patience: float) -> bool:
        """Return whether the process sends its answer within `patience` seconds. Raises MemoryError if the process and
        its descendants use more than reward.memory_mb. Once a second, also check whether it has too many zombies."""
        limit, deadline = self.config.reward.memory_mb, time.monotonic() + patience
        while (now := time.monotonic()) < deadline:
            if now >= self._check_at:
                self._check_at = now + _CHECK_SECONDS
                process = self._process  # another thread may close it
                pid = process.pid if process else None
                self._is_full = pid is not None and zombies(pid) > _MOST_ZOMBIES
                if limit and pid and memory(pid) > limit * 2**20:
                    raise MemoryError(
                        f"the reward process and its children use more than reward.memory_mb = {limit} MiB"
                    )
            if self._connection.poll(min(deadline, self._check_at) - now):
                return True
        return False

    @property
    def runs(self) -> bool:
        """Whether there is a process. If not, the next call of `score_all` starts one."""
        return self._process is not None

    def close(self) -> None:
        """End the process, which computes nothing now. Exit handlers of the user have reward.timeout_seconds."""
        process = self._process  # another thread may kill it
        if process is not None:
            self._connection.close()
            process.join(self.config.reward.timeout_seconds)
            self.kill()

    def kill(self) -> None:
        """End the process at once. The next call of `score_all` starts a new one."""
        if self._process is not None:
            self._end()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.config, self.log, self.columns, self.opens))
        resource_tracker.ensure_running()  # here, because its start unblocks SIGINT and SIGTERM
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the process handles them
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._process = process
        # this runs before the exit handler of multiprocessing, which would send SIGTERM and wait
        self._end = Finalize(self, _end, (process, self._connection), exitpriority=100)
        fault, many = f"its process was not ready after {START_SECONDS:g} s", False
        try:
            if self._connection.poll(START_SECONDS):
                fault, many = self._connection.recv()
        except (EOFError, OSError):
            fault = "its process ended during startup; a training script needs `if __name__ == '__main__':`"
        self.at_once, self._is_full = AT_ONCE if many else 1, False
        if fault:
            self.kill()
            names_field = "reward.name" in fault or "reward.environment" in fault
            raise RewardError(fault if names_field else f"reward {self.config.reward.named} cannot start: {fault}")


def _end(process: BaseProcess, connection: Connection) -> None:
    with suppress(OSError):  # another thread may have closed it
        connection.close()
    assert process.pid is not None, "the process was started"
    kill_descendants(process.pid)
    with suppress(ProcessLookupError):  # the process has ended, or has no process group of its own yet
        os.killpg(process.pid, signal.SIGKILL)  # includes the processes that it started
    process.kill()
    process.join()


def _serve(connection: Connection, config: Config, log: Path | None, columns: Collection[str], opens: Open) -> None:
    os.setsid()
    _adopt_orphans()
    make_usual(connection)
    threading.Thread(target=_die_with_the_run, daemon=True).start()
    if limit := config.reward.memory_mb * 2**20:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    output = Output() if log else None
    try:
        answers, many = opens(config, columns)
    except BaseException as error:
        if output:
            output.onto_the_screen()
        connection.send((str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}", False))
        return
    handler = ignore_interrupts()
    connection.send(("", many))
    for count, asked in enumerate(_received(connection)):
        if log and output and count == 0:
            output.into(log)
        if output:
            output.bound()
        signal.signal(signal.SIGINT, handler)
        verdicts = [tuple(verdict) for verdict in answers(asked)]
        handler = ignore_interrupts()
        connection.send((verdicts, late_threads() <= _MOST_LATE))
    signal.signal(signal.SIGINT, handler)  # for exit handlers


def _received(connection: Connection) -> Iterator[list[tuple[Prompt, Any]]]:
    while True:
        try:
            yield connection.recv()
        except (EOFError, OSError):
            return


def _adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that they end with it (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_the_run() -> None:
    run = multiprocessing.parent_process()
    assert run is not None, "this is a child process"
    run.join()
    kill_descendants(os.getpid())
    os.killpg(0, signal.SIGKILL)


# -- state of a reward process -----------------------------------------------------------------------------------------


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


def zombies(pid: int) -> int:
    """Return the number of descendants of a process that have ended, and whose parent has not waited for them."""
    count = 0
    for process in descendants(pid):
        with suppress(psutil.Error):
            count += process.status() == psutil.STATUS_ZOMBIE
    return count


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
