"""`tlt train --restarts N`: a run that was killed, or lost its workers, goes on by itself from its last checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from tlt.stopping import SIGNALS

LOST = 75
"""exit code of a run that lost its workers or its cluster: EX_TEMPFAIL of sysexits.h"""
_FINAL = (0, 2, *(128 + number for number in SIGNALS))
"""done; bad input; asked to stop"""
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0  # seconds, doubled with every restart: a cluster may take a while to be back


def keep_running(
    arguments: Sequence[str], restarts: int, checkpoints: Path, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Run `tlt` with these arguments in a process of its own, and again when it is lost, up to so many times in a row
    without a new checkpoint. Returns the exit code of the last one."""
    at_start, failures, own = _there(checkpoints), 0, False
    while True:
        before = _there(checkpoints)
        code, asked_to_stop = _run([*arguments, "--restarts", "0", *(["--resume", "auto"] if own else [])])
        after = _there(checkpoints)
        failures = failures + 1 if after == before else 1
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if asked_to_stop and code not in _FINAL:
            print(f"tlt: the run {how}, as it was asked to stop", file=sys.stderr)
        if code in _FINAL or failures > restarts or asked_to_stop:
            return code if code >= 0 else 128 - code
        own = (
            not at_start or after != at_start
        )  # else what is there is of a run before, which these arguments deal with
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (failures - 1))
        print(f"tlt: the run {how}; restart {failures} of {restarts} in {pause:g} s", file=sys.stderr)
        sleep(pause)


def _there(checkpoints: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in checkpoints.glob("step_????????")}


def newest(checkpoints: Path) -> int:
    """Steps of the newest checkpoint; 0 if there is none."""
    return max((int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_????????")), default=0)


def _run(arguments: Sequence[str]) -> tuple[int, bool]:
    """The exit code, and whether the process was asked to stop. Ctrl-C and the end of the terminal reach all processes;
    SIGTERM reaches this one alone, and is passed on. A process that has no handlers yet is killed by it."""
    signals: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def hear(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if number == signal.SIGTERM and children:
            children[0].send_signal(number)

    before = {number: signal.signal(number, hear) for number in SIGNALS}
    try:
        children.append(subprocess.Popen([sys.executable, "-m", "tlt", *arguments]))
        if signals:  # before it was there
            children[0].terminate()
        return children[0].wait(), bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
