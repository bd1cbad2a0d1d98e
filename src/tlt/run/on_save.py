"""Command of the user that runs in the background after each save, such as a copy of the checkpoint to a bucket."""

from __future__ import annotations

import logging
import shlex
import shutil
import subprocess
from pathlib import Path

from tlt.config import ConfigError

_log = logging.getLogger(__name__)


class OnSave:
    """Runner of run.on_save. At most one command runs at a time. While it runs, later checkpoints wait, and only the
    newest of them gets a command. A command that fails is logged, and the run continues."""

    def __init__(self, command: str) -> None:
        """Raise ConfigError if the program does not exist."""
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"run.on_save = {command!r} is not a command: {error}") from None
        if not self._words or not shutil.which(self._words[0]):
            raise ConfigError(f"run.on_save = {command!r} names no program on this machine: install or correct it")
        self._running: subprocess.Popen[bytes] | None = None
        self._next: Path | None = None

    def saved(self, checkpoint: Path) -> None:
        """Run the command for a checkpoint, at once or when the present command has ended."""
        self._next = checkpoint
        self._go_on()

    def close(self) -> None:
        """Wait until the command has ended for the newest checkpoint."""
        while self._running or self._next:
            if self._running:
                self._running.wait()
            self._go_on()

    def _go_on(self) -> None:
        if self._running:
            code = self._running.poll()
            if code is None:
                return
            if code:
                _log.warning("run.on_save ended with exit code %d: %s", code, self._running.args)
            self._running = None
        if self._next:
            place, name = str(self._next.absolute()), self._next.name
            words = [word.replace("{checkpoint}", place).replace("{name}", name) for word in self._words]
            # a session of its own, so that Ctrl-C does not reach it
            self._next = None
            try:
                self._running = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
            except OSError as error:  # the program was removed or changed since the start of the run
                _log.warning("run.on_save cannot run (%s): %s", error.strerror, words)
