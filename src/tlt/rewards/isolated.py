"""A process for the code of others: what hangs, raises or dies in it is a named verdict, and the run goes on."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import NamedTuple

from tlt.config import Config
from tlt.rewards.scores import Answer, RewardError, Term, make_terms
from tlt.stopping import SIGNALS
from tlt.types import Prompt

START_SECONDS = 120.0  # to import the user's module
_NOT_FOR_US = SIGNALS  # sent to the whole group: the run finishes its step first


class Verdict(NamedTuple):
    reward: float | None
    outcome: str = ""
    """why there is no reward: timeout, error, not a number, crash"""
    detail: str = ""
    """for a person: what was raised or returned"""
    scores: Mapping[str, float] = {}
    """of each term, before its weight; none where there is no reward"""


def judge(terms: Sequence[Term], prompt: Prompt, answer: Answer) -> Verdict:
    """A term that fails leaves the response without a reward."""
    reward, scores = 0.0, dict[str, float]()
    for term in terms:
        try:
            value = term.score(prompt, answer)
        except Exception as error:
            return Verdict(None, "error", f"{type(error).__name__}: {_text(str, error)}")
        try:
            score = float(value)
        except Exception:  # of a user's own class it may raise anything
            score = math.nan
        if not math.isfinite(score):
            return Verdict(None, "not a number", f"it gave {_text(repr, value)}"[:200])
        scores[term.name] = score
        reward += term.weight * score
    if not math.isfinite(reward):
        return Verdict(None, "not a number", f"the sum of its terms is {reward}")
    return Verdict(reward, scores=scores)


def _text(form: Callable[[object], str], thing: object) -> str:
    """Of a user's own class that may raise anything too."""
    try:
        return form(thing)
    except Exception:
        return f"a {type(thing).__name__} that cannot be printed"


class IsolatedScore:
    """`make_terms(config)` in a process of its own, kept between calls, killed and replaced where it does not answer.

    Spawned, never forked: torch's threads do not survive a fork. Raises RewardError if the process cannot start.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._process: BaseProcess | None = None
        self._start()

    def judge(self, prompt: Prompt, answer: Answer) -> Verdict:
        if self._process is None:
            self._start()
        limit = self.config.reward.timeout_seconds
        try:
            self._connection.send((prompt, answer))
            if self._connection.poll(limit):
                return Verdict(*self._connection.recv())
            verdict = Verdict(None, "timeout", f"no answer in {limit:g} s")
        except (EOFError, OSError):
            verdict = Verdict(None, "crash", "its process ended")
        self.close()
        return verdict

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None:
            self._end()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.config))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_US)  # until it can ignore them itself
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._process = process
        # before multiprocessing's own exit handler, which would ask with a SIGTERM and wait
        self._end = Finalize(self, _end, (process, self._connection), exitpriority=100)
        try:
            fault = self._connection.recv() if self._connection.poll(START_SECONDS) else "it did not start in time"
        except (EOFError, OSError):
            fault = "its process ended as it started; a script that trains needs `if __name__ == '__main__':`"
        if fault:
            self.close()
            names = ", ".join(term.name for term in self.config.reward.all_terms)
            raise RewardError(fault if "reward.name" in fault else f"reward {names} cannot start: {fault}")


def _end(process: BaseProcess, connection: Connection) -> None:
    connection.close()
    assert process.pid is not None, "it has been started"
    with suppress(ProcessLookupError):  # it ended, or has not yet made a group of its own
        os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started itself
    process.kill()
    process.join()


def _serve(connection: Connection, config: Config) -> None:
    os.setsid()
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOT_FOR_US)
    threading.Thread(target=_die_with_the_run, daemon=True).start()
    try:
        terms = make_terms(config)
    except Exception as error:
        connection.send(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
        return
    connection.send("")
    while True:
        try:
            prompt, answer = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(tuple(judge(terms, prompt, answer)))


def _die_with_the_run() -> None:
    run = multiprocessing.parent_process()
    assert run is not None, "this is a child process"
    run.join()
    os.killpg(0, signal.SIGKILL)
