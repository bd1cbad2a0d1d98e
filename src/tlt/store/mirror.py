"""Checkpoints in a second place, such as `s3://bucket/run`: any that fsspec knows. A run works in its own folder, and
its checkpoints are copied from there in the background. A copy is whole or does not count: its manifest is copied last,
and is the first file to be removed."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from tlt.config import ConfigError
from tlt.config.run import RunConfig
from tlt.store.checkpoint import MANIFEST, Checkpoint, CheckpointError, fault, latest, steps_of
from tlt_rl import install_hint

log = logging.getLogger(__name__)
_TELLS = 3.0  # seconds: a run that waits longer for the last copy says so


class Mirror:
    def __init__(self, url: str, keep: int) -> None:
        """Keeps the newest `keep` checkpoints. Raises ConfigError where fsspec, or what it needs for such a place, is
        missing, or where nothing can be written there."""
        self.url, self.keep = url, keep
        self._newest: Path | None = None  # of those that are to be copied
        self._copied: Path | None = None  # the last one that was
        try:
            from fsspec.core import url_to_fs  # an extra

            self._files, self._root = url_to_fs(url)
            self._refuse_to_be_kept_out()
            self._there = self._whole()
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"run.mirror = {url!r} cannot be used ({error}): {install_hint('mirror')}, for S3 {install_hint('s3')}"
            ) from None
        except Exception as error:  # of any library for any place
            remedy = "see that the bucket, or the folder above, is there, and that these keys may write to it"
            raise ConfigError(f"run.mirror = {url!r} cannot be written to ({_said(error)}): {remedy}") from None
        self._copier = ThreadPoolExecutor(1, "mirror")

    def _refuse_to_be_kept_out(self) -> None:
        """Raises what the library raises where nothing can be written. A bucket that is missing is not made."""
        if "/" in self._root:
            self._make(self._root)
        place = f"{self._root}/.writable"
        self._files.pipe_file(place, b"")
        self._files.rm_file(place)

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
        """In the background. Where one before is still on its way this one waits for it, in the place of any other that
        waits."""
        self._newest = checkpoint
        self._copier.submit(self._copy, checkpoint)

    def _copy(self, checkpoint: Path) -> None:
        if checkpoint != self._newest or checkpoint == self._copied:
            return
        try:
            with _held(checkpoint) as held:
                self._put(held, checkpoint.name)
            self._copied = checkpoint
            whole = self._whole()
            older = sorted(name for name in whole if name <= checkpoint.name)  # a newer one may be damaged
            for name in sorted(self._found() - {*older[-self.keep :], *(set(whole) - set(older))}):
                self._remove(name)
        except Exception as error:  # of any library for any place: the run's own checkpoints are there
            then = "tried again at the end of the run, unless a newer one is copied until then"
            log.warning("%s was not copied to %s (%s): %s", checkpoint.name, self.url, _said(error), then)

    def _put(self, checkpoint: Path, name: str) -> None:
        self._remove(name)
        paths = sorted(path for path in checkpoint.rglob("*") if path.name != MANIFEST)
        self._make(f"{self._root}/{name}")
        for path in [*paths, checkpoint / MANIFEST]:
            place = f"{self._root}/{name}/{path.relative_to(checkpoint).as_posix()}"
            self._make(place) if path.is_dir() else self._files.put_file(str(path), place)

    def _make(self, folder: str) -> None:
        """Below one that is there. In a store of objects only the bucket is looked for."""
        with suppress(FileExistsError):
            self._files.mkdir(folder, create_parents=False)

    def _remove(self, name: str) -> None:
        place = f"{self._root}/{name}"
        if self._files.exists(f"{place}/{MANIFEST}"):
            self._files.rm_file(f"{place}/{MANIFEST}")
        if self._files.exists(place):
            self._files.rm(place, recursive=True)

    def close(self) -> None:
        """Once the newest one is copied, or cannot be."""
        if self._newest:
            under_way = self._copier.submit(self._copy, self._newest)
            if under_way not in wait([under_way], _TELLS).done:
                log.warning("%s is on its way to %s: the run ends once it is there", self._newest.name, self.url)
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


@contextmanager
def _held(checkpoint: Path) -> Iterator[Path]:
    """The same files under a name that stays while the run saves others, and removes this one."""
    held = checkpoint.with_name(f".{checkpoint.name}.copied")
    for left_over in checkpoint.parent.glob(".step_*.copied"):
        shutil.rmtree(left_over)
    try:
        yield Path(shutil.copytree(checkpoint, held, copy_function=_link))
    finally:
        shutil.rmtree(held, ignore_errors=True)


def _link(path: str, other: str) -> None:
    try:
        os.link(path, other)
    except OSError:  # as on file systems that have none
        shutil.copy2(path, other)


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
