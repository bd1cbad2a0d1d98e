"""Redirection of what a reward process prints to a log file of the run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

_MOST_BYTES = 16 * 2**20


class Output:
    """Redirected stdout and stderr of this process and of the programs that it starts.

    The output is buffered in a temporary file until the first call for a reward. A log file that is written earlier
    would be moved away with the files of the previous run.
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
