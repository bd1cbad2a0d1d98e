"""Checkpoints in a second place, such as `s3://bucket/run`: any that fsspec knows. A run works in its own folder; each
checkpoint is copied from there in the background, and is there whole or not at all: its manifest is copied last, and is
the first to be removed."""

from __future__ import annotations

import logging
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from tlt.checkpoint import MANIFEST, Checkpoint, CheckpointError, fault, latest, steps_of
from tlt.config import ConfigError
from tlt.config.sections import RunConfig

log = logging.getLogger(__name__)


class Mirror:
    def __init__(self, url: str, keep: int) -> None:
        """Keeps the newest `keep` checkpoints. Raises ConfigError where fsspec, or what it needs for such a place, is
        missing, or the place cannot be reached."""
        self.url, self.keep = url, keep
        try:
            from fsspec.core import url_to_fs  # an extra

            self._files, self._root = url_to_fs(url)
            self._there = self._whole()
        except (ImportError, ValueError) as error:
            raise ConfigError(f"run.mirror = {url!r} cannot be used ({error}): see tlt[mirror] and tlt[s3]") from None
        except Exception as error:  # of any library for any place
            raise ConfigError(f"run.mirror = {url!r} cannot be reached ({_said(error)})") from None
        self._copier = ThreadPoolExecutor(1, "mirror")

    @property
    def newest(self) -> int:
        """Steps of the newest whole checkpoint; 0 if there is none."""
        return max(map(steps_of, self._there), default=0)

    def refuse_another_run(self) -> None:
        """Raises ConfigError where a run that starts afresh would mix its checkpoints with others."""
        if self._there:
            raise ConfigError(f"{self.url} already holds checkpoints: go on with --resume, or give another run.mirror")

    # -- there ---------------------------------------------------------------------------------------------------------

    def copy(self, checkpoint: Path) -> None:
        """In the background. Where the one before is still on its way this one waits for it."""
        self._copier.submit(self._copy, checkpoint)

    def _copy(self, checkpoint: Path) -> None:
        try:
            self._remove(checkpoint.name)
            files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST)
            for path in [*files, checkpoint / MANIFEST]:
                place = f"{self._root}/{checkpoint.name}/{path.relative_to(checkpoint).as_posix()}"
                self._files.makedirs(str(PurePosixPath(place).parent), exist_ok=True)
                self._files.put_file(str(path), place)
            whole = self._whole()
            for name in sorted(self._found() - set(sorted(whole)[-self.keep :])):
                self._remove(name)
        except Exception as error:  # of any library for any place: the run's own checkpoints are there
            log.warning("%s was not copied to %s (%s): the next one will be", checkpoint.name, self.url, _said(error))

    def _remove(self, name: str) -> None:
        place = f"{self._root}/{name}"
        if self._files.exists(f"{place}/{MANIFEST}"):
            self._files.rm_file(f"{place}/{MANIFEST}")
        if self._files.exists(place):
            self._files.rm(place, recursive=True)

    def close(self) -> None:
        """Once all is copied."""
        self._copier.shutdown(wait=True)

    # -- and back ------------------------------------------------------------------------------------------------------

    def fetch(self, root: Path, newer_than: int) -> None:
        """The newest whole checkpoint goes into this folder, if it is one of more steps, in the place of a damaged one.
        Raises CheckpointError."""
        for name in sorted((name for name in self._there if steps_of(name) > newer_than), reverse=True):
            draft = root / f".{name}.partial"
            shutil.rmtree(draft, ignore_errors=True)
            try:
                for place in self._files.find(f"{self._root}/{name}"):
                    path = draft / PurePosixPath(place).relative_to(PurePosixPath(self._root) / name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(place, str(path))
            except Exception as error:
                raise CheckpointError(f"{name} cannot be fetched from {self.url} ({_said(error)})") from None
            if wrong := fault(draft):
                log.warning("%s in %s is passed over: %s", name, self.url, wrong)
                shutil.rmtree(draft)
                continue
            shutil.rmtree(root / name, ignore_errors=True)
            draft.rename(root / name)
            return

    def _found(self) -> set[str]:
        """Folders of checkpoints, whole or not."""
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return set()
        names = {PurePosixPath(place).name for place in self._files.ls(self._root, detail=False)}
        return {name for name in names if re.fullmatch(r"step_\d{8}", name)}

    def _whole(self) -> list[str]:
        return [name for name in self._found() if self._files.exists(f"{self._root}/{name}/{MANIFEST}")]


def _said(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def mirror_of(run: RunConfig) -> Mirror | None:
    """As the recipe says. Raises ConfigError."""
    return Mirror(run.mirror, run.keep) if run.mirror else None


def latest_of(checkpoints: Path, mirror: Mirror | None) -> Checkpoint:
    """The newest whole one, fetched from the mirror if that has one of more steps. Raises CheckpointError."""
    if mirror:
        try:
            done = latest(checkpoints).state["step"]
        except CheckpointError:
            done = 0
        mirror.fetch(checkpoints, newer_than=done)
    return latest(checkpoints)
