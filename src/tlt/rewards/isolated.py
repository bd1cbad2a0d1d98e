"""Separate process for reward functions and environments of the user. If this code hangs, raises an exception or ends
the process, the verdict names the fault and the run continues."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from tlt.config import Config
from tlt.rewards.answers import Answer, RewardError
from tlt.rewards.processes import Output, ignore_interrupts, kill_descendants, make_usual, memory
from tlt.rewards.scores import Term, make_terms
from tlt.rewards.user_calls import AT_ONCE, late_threads
from tlt.rewards.verdicts import DIED, LARGEST, Verdict, number
from tlt.stopping import SIGNALS
from tlt.types import Prompt

START_SECONDS = 120.0  # timeout for the start of a process, which imports the user's module
_GRACE_SECONDS = 1.0  # added to the timeout of a call that may have several responses
_CHECK_SECONDS = 1.0  # time between two checks of the memory of the process
_MOST_LATE = 64  # largest number of threads of calls that timed out; a process with more is replaced
_PR_SET_CHILD_SUBREAPER = 36


def score(terms: Sequence[Term], prompt: Prompt, answer: Answer) -> Verdict:
    return score_all(terms, [(prompt, answer)])[0]


def score_all(terms: Sequence[Term], asked: Sequence[tuple[Prompt, Answer]]) -> list[Verdict]:
    """Return a verdict for each (prompt, answer). The reward is the weighted sum of the terms' scores. A term that
    returns None is left out. If a term fails, its `if_fails` decides whether the reward is missing or the term is left
    out."""
    columns = [term.scores(asked) for term in terms]
    return [_verdict(terms, values) for values in zip(*columns, strict=True)]


def _verdict(terms: Sequence[Term], values: Sequence[Any]) -> Verdict:
    """Return the verdict of one response from the values of its terms. A value is a number, None or an exception."""
    reward, scores, failed = 0.0, dict[str, float](), None
    for term, value in zip(terms, values, strict=True):
        if value is None:
            continue
        score, fault = number(value)
        if fault and term.if_fails == "response":
            return fault
        if fault:
            failed = fault
            continue
        scores[term.name] = score
        reward += term.weight * score
    if not scores:
        return failed or Verdict(None, "does not apply", "each term returned None")
    if not abs(reward) <= LARGEST:
        return Verdict(None, "not a number", f"the sum of its terms is {reward}")
    return Verdict(reward, scores=scores)


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
    next call starts a new process. This also happens if many threads of the user's async calls do not end.

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
                if not goes_on:
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
        its descendants use more than reward.memory_mb."""
        limit, deadline = self.config.reward.memory_mb, time.monotonic() + patience
        while (now := time.monotonic()) < deadline:
            if now >= self._check_at:
                self._check_at = now + _CHECK_SECONDS
                process = self._process  # another thread may close it
                if limit and process and process.pid and memory(process.pid) > limit * 2**20:
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
        self.at_once = AT_ONCE if many else 1
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
