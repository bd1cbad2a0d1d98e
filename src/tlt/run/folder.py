"""Folder of a run, which only one run at a time may use, and the user's command after each save."""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tlt.config import ConfigError
from tlt.config.sections import RunConfig

FILES = (
    *("config.json", "metrics.jsonl", "completions.jsonl", "completions.old.jsonl", "replies.jsonl", "summary.json"),
    *("trackers.json", "trace.json", "report.html", "reward.log", "ray.log"),
)
"""files that a run writes; the logs of the workers are not listed"""
FOLDERS = ("checkpoints", "best", "drafter", "tensorboard")
"""folders that a run writes"""
_LOCK, _LATEST = ".tlt.lock", "latest"


class RunFolder:
    """Folder of a run, locked from the start to the end of the run. The constructor raises ConfigError if the folder
    cannot be created, or if another run uses it. If `resume` is false, it also raises ConfigError if the folder
    contains a previous run and run.overwrite is false. A folder without a lock file is not a run's: then it must not
    contain a file or folder that a run would write."""

    def __init__(self, run: RunConfig, resume: bool) -> None:
        self.path = Path(run.folder)
        self._made = not self.path.exists()
        if not resume and not (self.path / _LOCK).exists():
            for stranger in self._written():
                raise ConfigError(f"{stranger} is not from a run of tlt: move it away, or set another --run.folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path / _LOCK)
        except OSError as error:
            problem = f"{self.path} cannot be created or written to ({error.strerror}): set another --run.folder"
            raise ConfigError(problem) from None
        try:
            if not resume and not run.overwrite:
                self._refuse_previous_run()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. Remove the folder if this run created it and wrote nothing into it."""
        if self._made and os.listdir(self.path) == [_LOCK]:
            (self.path / _LOCK).unlink()
            self.path.rmdir()
        os.close(self._lock)

    def _refuse_previous_run(self) -> None:
        saved, metrics = has_checkpoints(self.path), self.path / "metrics.jsonl"
        if saved or (metrics.is_file() and metrics.stat().st_size):
            without, goes_on = ("", "continue it with --resume, or ") if saved else (", without a checkpoint", "")
            raise ConfigError(
                f"{self.path} already contains a run{without}: {goes_on}set --run.overwrite true or another "
                "--run.folder"
            )

    def delete_previous_run(self) -> None:
        """Delete what a previous run wrote. Other files are kept. Call this after all checks of the new run."""
        for path in self._written():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _written(self) -> list[Path]:
        """Return the files and folders that are named like those of a run."""
        found = [path for name in (*FOLDERS, *FILES) if (path := self.path / name).exists()]
        link = self.path / _LATEST
        return [*found, link] if link.is_symlink() else found

    def point_to(self, checkpoint: Path) -> None:
        """Make the symbolic link `latest` in the run's folder point to a checkpoint, if the file system supports links.
        Other files named `latest` are kept."""
        link, fresh = self.path / _LATEST, self.path / f".{_LATEST}"
        if link.exists() and not link.is_symlink():
            return
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(checkpoint.relative_to(self.path), target_is_directory=True)
            fresh.replace(link)


def _locked(path: Path) -> int:
    """Open a file and lock it until its descriptor is closed. Return the descriptor. Raises ConfigError if another run
    has the lock."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.read(handle, 200).decode(errors="replace").strip()
        os.close(handle)
        raise ConfigError(
            f"another run uses {path.parent} ({who}): wait for its end, or set another --run.folder"
        ) from None
    except OSError:  # the file system does not support locks
        return handle
    os.truncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return handle


def has_checkpoints(folder: Path) -> bool:
    """Return whether the folder of a run has a checkpoint, complete or not."""
    return any((folder / "checkpoints").glob("step_????????"))


# -- command after a save ----------------------------------------------------------------------------------------------


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
