"""Folder of a run. Only one run at a time may use it. If a new run starts in the folder of a previous run, the files of
the previous run are kept until the new run has saved its first checkpoint."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tlt.config import ConfigError
from tlt.config.run import RunConfig

_STEP = b'{"step": '
FILES = {
    "config.json": b'{\n  "model": {',
    "metrics.jsonl": _STEP,
    "completions.jsonl": _STEP,
    "completions.old.jsonl": _STEP,
    "replies.jsonl": _STEP,
    "summary.json": b'{\n  "steps": ',
    "trackers.json": b"{\n  ",
    "trace.json": b'{"traceEvents": [',
    "report.html": b"<!doctype html>",
    **dict.fromkeys(("reward.log", "ray.log"), b""),
}
"""file that a run writes -> bytes with which it begins; the logs of the workers are not listed"""
FOLDERS = {
    "checkpoints": re.compile(r"\.?step_\d{8}(\.partial|\.copied)?"),
    "completions": re.compile(r"step_\d{8}\.parquet(\.partial)?"),
    "best": re.compile(r"\.?step_\d{8}(\.partial)?"),
    "drafter": re.compile(r"\.?drafter_\d{8}(\.partial)?"),
    "tensorboard": re.compile(r"events\.out\.tfevents\..+"),
}
"""folder that a run writes -> pattern of the names of the files and folders in it"""
_LOCK, _BEFORE, _LATEST = ".lock", "previous", "latest"


class RunFolder:
    """Folder of a run, locked from the start to the end of the run. The constructor raises ConfigError if the folder
    cannot be created, or if another run uses it. If `resume` is false, it also raises ConfigError if the folder
    contains a previous run and run.overwrite is false, or a file with the name of a run's file that no run has
    written."""

    def __init__(self, run: RunConfig, resume: bool) -> None:
        self.path = Path(run.folder)
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path / _LOCK)
        except OSError as error:
            problem = f"{self.path} cannot be created or written to ({error.strerror}): set another --run.folder"
            raise ConfigError(problem) from None
        try:
            if not resume:
                self._refuse_what_is_there(run.overwrite)
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

    def _refuse_what_is_there(self, overwrite: bool) -> None:
        for stranger in _strangers(self.path):
            raise ConfigError(f"{stranger} is not from a run of tlt: move it away, or set another --run.folder")
        saved = has_checkpoints(self.path)
        # the first checkpoint of a new run deletes previous runs
        if (saved or self.kept() or _has_steps(self.path)) and not overwrite:
            without, goes_on = ("", "continue it with --resume, or ") if saved else (", without a checkpoint", "")
            raise ConfigError(
                f"{self.path} already contains a run{without}: {goes_on}set --run.overwrite true or another "
                "--run.folder"
            )

    def move_previous_run(self) -> None:
        """Move the previous run into a subfolder, where it can be resumed. Call this after all checks of the new
        run."""
        if not _holds_a_run(self.path):
            return
        number = 1 + max(map(_number, self.before()), default=0)
        place = self.path / (_BEFORE if number == 1 else f"{_BEFORE}_{number}")
        place.mkdir()
        for path in _of_a_run(self.path):
            path.rename(place / path.name)

    def before(self) -> list[Path]:
        """Return the subfolders with the files of previous runs, the oldest first."""
        return sorted((path for path in self.path.glob(f"{_BEFORE}*") if _number(path) and path.is_dir()), key=_number)

    def kept(self) -> list[Path]:
        """Return the subfolders of previous runs that have a checkpoint, the oldest first."""
        return [place for place in self.before() if has_checkpoints(place)]

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

    def forget_before(self) -> None:
        """Delete previous runs, except files that no run writes. A subfolder is kept as a whole if a file in it has the
        name of a run's file but other content. Files that cannot be deleted are kept too. Call this when the new run
        has saved a checkpoint."""
        for place in self.before():
            if _strangers(place):
                continue
            for path in _of_a_run(place):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with suppress(OSError):
                        path.unlink()
            with suppress(OSError):  # the subfolder is not empty
                place.rmdir()


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


def _number(place: Path) -> int:
    """Return the number of a previous run's subfolder: 1 for `previous`, 2 for `previous_2`; 0 for another name."""
    found = re.fullmatch(rf"{_BEFORE}(?:_(\d+))?", place.name)
    return int(found[1] or 1) if found else 0


def _holds_a_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() or (folder / "checkpoints").is_dir()


def has_checkpoints(folder: Path) -> bool:
    """Return whether the folder of a run has a checkpoint, complete or not."""
    return any((folder / "checkpoints").glob("step_????????"))


def _has_steps(folder: Path) -> bool:
    """Return whether a run in this folder has finished a step."""
    metrics = folder / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def _of_a_run(folder: Path) -> list[Path]:
    found = [path for name in (*FOLDERS, *FILES) if (path := folder / name).exists()]
    link = folder / _LATEST
    return [*found, link] if link.is_symlink() else found


def _strangers(folder: Path) -> list[Path]:
    """Return the files and folders that are named like those of a run, but have content that no run writes."""
    found = []
    for name, pattern in FOLDERS.items():
        place = folder / name
        if place.is_dir():
            found += sorted(path for path in place.iterdir() if not pattern.fullmatch(path.name))
        elif place.exists():
            found.append(place)
    return found + [path for name, start in FILES.items() if not _begins(path := folder / name, start)]


def _begins(path: Path, start: bytes) -> bool:
    """Return whether a file is missing, begins with `start`, or is shorter and has a beginning of `start`."""
    if not path.is_file():
        return not path.exists()
    with path.open("rb") as file:
        return start.startswith(file.read(len(start)))
