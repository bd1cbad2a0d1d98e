"""Reward processes: their CPU time, memory and descendants, and the log file for what they print.

Descendants are read from /proc, because psutil reads all processes of the machine for them. Without Linux there are
none.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

Number = TypeVar("Number", int, float)
_PROC = Path("/proc")
_MOST_BYTES = 16 * 2**20


def descendants(pid: int | None) -> list[int]:
    """Return the process ids of all descendants of a process, including those that left its process group."""
    family = [pid]
    for one in family:
        with suppress(OSError):  # the process has ended
            for thread in (_PROC / f"{one}/task").iterdir():
                family += map(int, (thread / "children").read_text(encoding="utf-8").split())
    return [one for one in family[1:] if one]


def kill_descendants(pid: int) -> None:
    for one in descendants(pid):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def zombies(pid: int) -> int:
    """Return the number of descendants of a process that have ended, and whose parent has not waited for them."""
    return sum(_measured(one, lambda process: process.status() == psutil.STATUS_ZOMBIE) for one in descendants(pid))


def processor_seconds(pid: int | None) -> float:
    return _measured(pid, lambda process: sum(process.cpu_times()[:2]))


def memory(pid: int | None, enough: int) -> int:
    """Return the memory in bytes that a process and its descendants use.

    At first, a page that forked processes share is counted once for each process. If the sum exceeds `enough` bytes,
    measure again and count each shared page once. The second measurement takes longer.
    """
    family = [pid, *descendants(pid)]
    at_most = sum(_measured(one, lambda process: process.memory_info().rss) for one in family)
    if at_most <= enough:
        return at_most
    return sum(_measured(one, lambda process: process.memory_full_info().pss) for one in family)


def _measured(pid: int | None, measure: Callable[[psutil.Process], Number]) -> Number | int:
    """Return a measurement of a process, or 0 if the process has ended."""
    try:
        return measure(psutil.Process(pid)) if pid else 0
    except psutil.Error:
        return 0


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
