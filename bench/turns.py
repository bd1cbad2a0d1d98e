"""Lets runs take turns, a step at a time, so that a machine which is slow for a minute is slow for all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from rich.console import Console

from tlt.cluster.sweeper import marked
from tlt.config import Config
from tlt.loop import StepResult
from tlt.progress import working
from tlt.run.display import Display
from tlt.types import WorkerNow

_BENCH = Path(__file__).parent
_AWAKE = 0.1  # seconds for Ray to do what it missed while it was stopped


class BenchError(ValueError):
    """A run of the benchmark failed; the message names it."""


Turn = Callable[[dict[str, float]], None]
"""A run calls this between two steps, with the seconds of the last step. It returns when the run may do the next
step."""


class Pausing:
    """A turn that stops the run's Ray until the next one: even idle it would take 5 % of a core from the run whose turn
    it is. The driver and its sweeper are not stopped, so Ray can still be ended."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.folder = ""
        """folder of the run's own Ray"""

    def __call__(self, report: dict[str, float]) -> None:
        self._signal(signal.SIGSTOP)
        try:
            self.turn(report)
        finally:
            self._signal(signal.SIGCONT)
            time.sleep(_AWAKE)

    def _signal(self, number: signal.Signals) -> None:
        for pid in marked(self.folder) if self.folder else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class TakingTurns(Display):
    """A display that shows nothing. It waits for its turn before every step and after the last one, when no clock of
    the run is on."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(Console(quiet=True))
        self.turn = turn

    @contextmanager
    def live(
        self,
        config: Config,
        first: int,
        workers_now: Callable[[], Sequence[WorkerNow]],
        updated: Callable[[], float] = lambda: 0.0,
    ) -> Iterator[None]:
        self.turn({})
        with super().live(config, first, workers_now, updated):
            yield

    def step(self, result: StepResult) -> None:
        super().step(result)
        self.turn({"seconds": sum(of_the_step(result.metrics.seconds).values())})


def of_the_step(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, without their sum, evaluation, and saving, which no run but a bench's does every step."""
    return {phase: spent for phase, spent in seconds.items() if phase not in ("total", "save", "eval")}


class Run(Protocol):
    """A run that is given turns."""

    def wait(self) -> dict[str, float] | None:
        """Wait until it next waits for its turn, and return its report; None when it has ended."""
        ...

    def go(self) -> None: ...

    def end(self) -> int:
        """End it if it has not ended, and return its exit code."""
        ...


class Process:
    """bench/one_run.py, or another program with its arguments, in a process of its own."""

    def __init__(self, config_file: Path, threads: int, program: str = "one_run.py") -> None:
        command = [sys.executable, str(_BENCH / program), str(config_file), str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._run = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._ended = False

    def wait(self) -> dict[str, float] | None:
        assert self._run.stdout
        line = self._run.stdout.readline()
        self._ended = not line
        return json.loads(line) if line else None

    def go(self) -> None:
        assert self._run.stdin
        self._run.stdin.write("\n")
        self._run.stdin.flush()

    def end(self) -> int:
        if not self._ended:
            self._run.kill()
        return self._run.wait()


def over_pipes() -> Turn:
    """The turn of this process: reports go to its standard output, and all else that is printed to its error output."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def turn(report: dict[str, float]) -> None:
        print(json.dumps(report), file=said, flush=True)
        if not sys.stdin.readline():
            sys.exit("tlt: whoever gave the turns is gone")

    return turn


def race(runs: Mapping[str, Callable[[], Run]], steps: int, note: Callable[[str], None]) -> None:
    """Start all runs, then let each do a step in turn. Raises BenchError if a run fails."""
    going: dict[str, Run] = {}
    try:
        for name, start in runs.items():
            note(f"{name} comes up")
            with working(f"start {name}"):
                going[name] = start()
                _wait(name, going[name])
        with working("runs in turn", steps, "steps") as work:
            for step in range(steps):
                seconds = {}
                for name, run in going.items():
                    run.go()
                    seconds[name] = _wait(name, run)["seconds"]
                spent = "  ".join(f"{name} {spent:.2f} s" for name, spent in seconds.items())
                note(f"step {step + 1}/{steps}  {spent}")
                work.advance()
        for name, run in going.items():
            run.go()
            if run.wait() is not None or run.end():
                raise BenchError(f"the {name} run did not come to its end: see above")
    finally:
        for run in going.values():
            run.end()


def _wait(name: str, run: Run) -> dict[str, float]:
    report = run.wait()
    if report is None:
        raise BenchError(f"the {name} run ended with exit code {run.end()}: see above")
    return report
