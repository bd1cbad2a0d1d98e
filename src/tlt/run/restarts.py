"""`tlt train --restarts N`: restarts a run from its last checkpoint if it was killed or lost its workers."""

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
"""exit codes after which there is no restart: success, bad input, stopped by a signal"""
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0  # seconds, doubled at every restart


def keep_running(
    arguments: Sequence[str], restarts: int, checkpoints: Path, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Run `tlt` with these arguments in a child process. Restart it if it fails, up to `restarts` times in a row
    without a new checkpoint. Return the exit code of the last process."""
    at_start, failures, own = _there(checkpoints), 0, False
    while True:
        before = _there(checkpoints)
        code, asked_to_stop = _run([*arguments, "--restarts", "0", *(["--resume", "auto"] if own else [])])
        after = _there(checkpoints)
        failures = failures + 1 if after == before else 1
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if asked_to_stop and code not in _FINAL:
            print(f"tlt: the run {how} after a signal asked it to stop", file=sys.stderr)
        if code in _FINAL or failures > restarts or asked_to_stop:
            return code if code >= 0 else 128 - code
        # until there is a new checkpoint, those in the folder are from a previous run, which the arguments handle
        own = not at_start or after != at_start
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (failures - 1))
        print(f"tlt: the run {how}; restart {failures} of {restarts} in {pause:g} s", file=sys.stderr)
        sleep(pause)


def _there(checkpoints: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in checkpoints.glob("step_????????")}


def newest(checkpoints: Path) -> int:
    """Return the number of steps of the newest checkpoint; 0 if there is none."""
    return max((int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_????????")), default=0)


def _run(arguments: Sequence[str]) -> tuple[int, bool]:
    """Return the exit code of the process, and whether a signal asked it to stop. Ctrl-C and the end of the terminal
    reach all processes. SIGTERM reaches only this one and is passed on. It kills a child that has no handlers yet."""
    signals: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def record_and_forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if number == signal.SIGTERM and children:
            children[0].send_signal(number)

    before = {number: signal.signal(number, record_and_forward) for number in SIGNALS}
    try:
        children.append(subprocess.Popen([sys.executable, "-m", "tlt", *arguments]))
        if signals:  # received before the process had started
            children[0].terminate()
        return children[0].wait(), bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
