"""`tlt train --restarts N`: a run that was killed or lost its workers is restarted from its last checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from tlt.stopping import SIGNALS, handled

LOST = 75
"""exit code of a run that lost its workers or its Ray cluster, or ran out of memory (EX_TEMPFAIL in sysexits.h)"""
_FINAL = (0, 2, *(128 + number for number in SIGNALS))
"""exit codes after which the run is not restarted: success, invalid input, stopped by a signal"""
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0  # seconds before a restart; doubled each time


def keep_running(
    arguments: Sequence[str], restarts: int, checkpoints: Path, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Run `tlt` with these arguments in a child process, and restart it if it fails. Give up after `restarts` restarts
    in a row without a new checkpoint in the folder `checkpoints`. Return the exit code of the last process, or 128 + n
    if signal n killed it."""
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
        # without a new checkpoint, those in the folder are from a previous run: do not add --resume
        own = not at_start or after != at_start
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (failures - 1))
        print(f"tlt: the run {how}; restart {failures} of {restarts} in {pause:g} s", file=sys.stderr)
        sleep(pause)


def _there(checkpoints: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in checkpoints.glob("step_????????")}


def _run(arguments: Sequence[str]) -> tuple[int, bool]:
    """Run `tlt` in a child process. Return its exit code, and whether a signal asked it to stop.

    The system sends Ctrl-C and the hangup of the terminal to both processes. SIGTERM reaches only this process, so it
    is forwarded to the child. SIGTERM kills a child that has not set up its signal handlers yet."""
    signals: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def record_and_forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if number == signal.SIGTERM and children:
            children[0].send_signal(number)

    with handled(record_and_forward):
        children.append(subprocess.Popen([sys.executable, "-m", "tlt", *arguments]))
        if signals:  # received before the child had started
            children[0].terminate()
        return children[0].wait(), bool(signals)
