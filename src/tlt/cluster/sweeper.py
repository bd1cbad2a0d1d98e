"""Small process that outlives the driver. After the driver has ended, it kills the remaining processes of the driver's
Ray and removes Ray's folder.

    python -m tlt.cluster.sweeper DRIVER FOLDER

DRIVER is the driver's process id. The sweeper starts its work when its standard input, a pipe from the driver, closes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "TLT_CLUSTER"
"""environment variable of all processes that the driver's Ray has started; its value is the folder of this Ray"""
_GRACE = 5.0  # seconds that Ray has to end by itself before its processes are killed


def marked(folder: str) -> list[int]:
    """Return the ids of all processes whose environment variable `MARK` is this folder, without zombie processes."""
    wanted = f"{MARK}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or already ended
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def sweep(folder: str, driver: int) -> None:
    until = time.monotonic() + _GRACE
    while left := [pid for pid in marked(folder) if pid not in (driver, os.getpid())]:
        if time.monotonic() > until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(sys.argv[2], int(sys.argv[1]))
