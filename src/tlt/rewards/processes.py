"""CPU time, memory and descendants of a process, from /proc. Without Linux the results are zero or empty."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def descendants(pid: int | None) -> list[int]:
    """Return the process ids of all descendants of a process, including those that left its process group."""
    family = [pid]
    for one in family:
        with suppress(OSError):  # the process has ended
            for thread in (_PROC / f"{one}/task").iterdir():
                family += map(int, (thread / "children").read_text(encoding="utf-8").split())
    return [one for one in family[1:] if one]


def processor_seconds(pid: int | None) -> float:
    try:
        fields = (_PROC / f"{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:  # the process has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int | None, enough: int) -> int:
    """Return the memory in bytes that a process and its descendants use.

    First each page that forked processes share counts once per process. If this sum exceeds `enough` bytes, shared
    pages are counted once in total, which takes longer to measure.
    """
    family = [pid, *descendants(pid)]
    at_most = sum(map(_resident, family))
    return at_most if at_most <= enough else sum(map(_share, family))


def _resident(pid: int | None) -> int:
    with suppress(OSError):
        return int((_PROC / f"{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _share(pid: int | None) -> int:
    """Return the proportional set size of a process in bytes: a page that n processes share counts 1/n."""
    with suppress(OSError):
        for line in (_PROC / f"{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)
