"""What a reward process prints goes to a file of the run, from its first line on."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

_MOST_BYTES = 16 * 2**20


class Output:
    """Of this process and the programs that it starts. Kept until the run has begun, as the file would otherwise be
    moved away with those of the run before."""

    def __init__(self) -> None:
        self._kept = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as the process
        self._screen = os.dup(2)
        self._to(self._kept.fileno())
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]

    def onto_the_screen(self) -> None:
        """As the process cannot start: what it has printed may say why."""
        self._pour(self._screen)

    def into(self, log: Path) -> None:
        try:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:  # there is no folder of a run
            return
        self._pour(file)
        os.close(file)

    def bound(self) -> None:
        """A file that has become too long begins anew; whoever else writes to it appends there."""
        if os.fstat(1).st_size > _MOST_BYTES:
            os.ftruncate(1, 0)

    def _pour(self, file: int) -> None:
        """What was kept, and from now on everything."""
        self._to(file)
        self._kept.seek(0)
        with os.fdopen(os.dup(file), "ab") as out:
            shutil.copyfileobj(self._kept, out)

    def _to(self, file: int) -> None:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(file, number)
