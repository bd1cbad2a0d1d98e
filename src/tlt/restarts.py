"""`tlt train --restarts N`: a run that was killed, or lost its workers, goes on by itself from its last checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LOST = 75
"""exit code of a run that lost its workers or its cluster: EX_TEMPFAIL of sysexits.h"""
_FINAL = (0, 2, *(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))
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
        code = _run([*arguments, "--restarts", "0", *(["--resume", "auto"] if own else [])])
        after = _there(checkpoints)
        failures = failures + 1 if after == before else 1
        if code in _FINAL or failures > restarts:
            return code if code >= 0 else 128 - code
        own = (
            not at_start or after != at_start
        )  # else what is there is of a run before, which these arguments deal with
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (failures - 1))
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        print(f"tlt: the run {how}; restart {failures} of {restarts} in {pause:g} s", file=sys.stderr)
        sleep(pause)


def _there(checkpoints: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in checkpoints.glob("step_????????")}


def newest(checkpoints: Path) -> int:
    """Steps of the newest checkpoint; 0 if there is none."""
    return max((int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_????????")), default=0)


def _run(arguments: Sequence[str]) -> int:
    """Ctrl-C and the end of the terminal reach all its processes; SIGTERM reaches this one alone, and is passed on."""
    child = subprocess.Popen([sys.executable, "-m", "tlt", *arguments])
    heard = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: _pass_on(child, number)) for number in heard}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(child: subprocess.Popen[bytes], number: int) -> None:
    if number == signal.SIGTERM:
        child.send_signal(number)
