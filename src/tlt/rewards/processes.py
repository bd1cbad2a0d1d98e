"""Reward processes: their CPU time, memory and descendants, and the log file for what they print.

CPU time, memory and descendants are read from /proc. Without Linux they are zero or empty.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

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
    return sum(_fields(one)[:1] == ["Z"] for one in descendants(pid))


def processor_seconds(pid: int | None) -> float:
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _fields(pid: int | None) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on. Return [] if the process has ended."""
    try:
        return (_PROC / f"{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def memory(pid: int | None, enough: int) -> int:
    """Return the memory in bytes that a process and its descendants use.

    At first, a page that forked processes share is counted once for each process. If the sum exceeds `enough` bytes,
    measure again and count each shared page once. The second measurement takes longer.
    """
    family = [pid, *descendants(pid)]
    at_most = sum(map(_resident, family))
    return at_most if at_most <= enough else sum(map(_share, family))


def _resident(pid: int | None) -> int:
    with suppress(OSError):
        return int((_PROC / f"{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _share(pid: int | None) -> int:
    """Return the proportional set size of a process in bytes: a page that n processes share counts 1/n. If it
    cannot be read, return the resident size."""
    with suppress(OSError):
        for line in (_PROC / f"{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)


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
