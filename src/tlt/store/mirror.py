"""Mirror: copies of a run's checkpoints at a URL that fsspec supports, such as `s3://bucket/run`.

A run saves checkpoints in its own folder, and they are copied from there in the background. A copy is complete if it
has a manifest.json, because this file is copied last and deleted first."""

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
from tlt.files import first_line
from tlt.store.checkpoint import MANIFEST, Checkpoint, CheckpointError, fault, latest, steps_of
from tlt_rl import install_hint

log = logging.getLogger(__name__)
_QUIET = 3.0  # seconds; if waiting for the last copy takes longer, a message is logged


class Mirror:
    def __init__(self, url: str, keep: int) -> None:
        """Open the mirror at `url`. The newest `keep` checkpoints are kept there. Raises ConfigError if fsspec or its
        backend for `url` is not installed, or if `url` cannot be written to."""
        self.url, self.keep = url, keep
        self._newest: Path | None = None  # newest checkpoint that is to be copied
        self._copied: Path | None = None  # last checkpoint that was copied
        try:
            from fsspec.core import url_to_fs  # installed with an extra

            self._files, self._root = url_to_fs(url)
            self._refuse_no_access()
            self._there = self._whole()
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"run.mirror = {url!r} cannot be used ({error}): {install_hint('mirror')} (S3: {install_hint('s3')})"
            ) from None
        except Exception as error:  # each fsspec backend has exceptions of its own
            remedy = "check that the bucket or the parent folder exists, and that the credentials may write to it"
            raise ConfigError(f"run.mirror = {url!r} cannot be written to ({first_line(error)}): {remedy}") from None
        self._copier = ThreadPoolExecutor(1, "mirror")

    def _refuse_no_access(self) -> None:
        """Write and delete a test file. Raises an error of the fsspec backend. A missing bucket is not created."""
        if "/" in self._root:
            self._make(self._root)
        place = f"{self._root}/.writable"
        self._files.pipe_file(place, b"")
        self._files.rm_file(place)

    @property
    def newest(self) -> int:
        """Number of steps of the newest complete checkpoint in the mirror; 0 if there is none."""
        return max(map(steps_of, self._there), default=0)

    def refuse_another_run(self) -> None:
        """Raise ConfigError if the mirror has checkpoints already, because a new run would mix them with its own."""
        if self._there:
            raise ConfigError(
                f"{self.url} already contains checkpoints: continue with --resume, or set another run.mirror"
            )

    # -- to the mirror -------------------------------------------------------------------------------------------------

    def copy(self, checkpoint: Path) -> None:
        """Copy a checkpoint to the mirror in the background. If an earlier copy is still running, the new one waits for
        it. If several wait, only the newest is copied."""
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
            older = sorted(name for name in whole if name <= checkpoint.name)  # those with more steps may be damaged
            for name in sorted(self._found() - {*older[-self.keep :], *(set(whole) - set(older))}):
                self._remove(name)
        except Exception as error:  # any error of the fsspec backend; the checkpoints in the run's folder are safe
            then = "it is tried again at the end of the run, unless a newer one is copied before"
            log.warning("%s was not copied to %s (%s): %s", checkpoint.name, self.url, first_line(error), then)

    def _put(self, checkpoint: Path, name: str) -> None:
        self._remove(name)
        paths = sorted(path for path in checkpoint.rglob("*") if path.name != MANIFEST)
        self._make(f"{self._root}/{name}")
        for path in [*paths, checkpoint / MANIFEST]:
            place = f"{self._root}/{name}/{path.relative_to(checkpoint).as_posix()}"
            self._make(place) if path.is_dir() else self._files.put_file(str(path), place)

    def _make(self, folder: str) -> None:
        """Create a folder in the mirror, inside an existing folder. In an object store only the bucket must exist."""
        with suppress(FileExistsError):
            self._files.mkdir(folder, create_parents=False)

    def _remove(self, name: str) -> None:
        place = f"{self._root}/{name}"
        if self._files.exists(f"{place}/{MANIFEST}"):
            self._files.rm_file(f"{place}/{MANIFEST}")
        if self._files.exists(place):
            self._files.rm(place, recursive=True)

    def close(self) -> None:
        """Wait until the newest checkpoint is copied to the mirror, or copying it has failed."""
        if self._newest:
            under_way = self._copier.submit(self._copy, self._newest)
            if under_way not in wait([under_way], _QUIET).done:
                log.warning("%s is being copied to %s: the run ends when that is done", self._newest.name, self.url)
        self._copier.shutdown(wait=True)

    # -- from the mirror -----------------------------------------------------------------------------------------------

    def fetch(self, root: Path, newer_than: int) -> None:
        """Copy the newest complete checkpoint of the mirror to the folder `root`, if it has more than `newer_than`
        steps. A damaged checkpoint of the same name in `root` is replaced. Raises CheckpointError."""
        for name in sorted((name for name in self._there if steps_of(name) > newer_than), reverse=True):
            draft = root / f".{name}.partial"
            shutil.rmtree(draft, ignore_errors=True)
            try:
                for place in self._files.find(f"{self._root}/{name}"):
                    path = draft / PurePosixPath(place).relative_to(PurePosixPath(self._root) / name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(place, str(path))
            except Exception as error:
                raise CheckpointError(
                    f"{name} cannot be fetched from {self.url} ({first_line(error)}): check the network and the "
                    "credentials"
                ) from None
            if wrong := fault(draft):
                log.warning("%s in %s is damaged and skipped: %s", name, self.url, wrong)
                shutil.rmtree(draft)
                continue
            shutil.rmtree(root / name, ignore_errors=True)
            draft.rename(root / name)
            return

    def _found(self) -> set[str]:
        """Return the names of all checkpoints in the mirror, complete or not."""
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return set()
        names = {PurePosixPath(place).name for place in self._files.ls(self._root, detail=False)}
        return {name for name in names if re.fullmatch(r"step_\d{8}", name)}

    def _whole(self) -> list[str]:
        return [name for name in self._found() if self._files.exists(f"{self._root}/{name}/{MANIFEST}")]


@contextmanager
def _held(checkpoint: Path) -> Iterator[Path]:
    """Yield a local copy of a checkpoint, made of hard links if possible. It exists until the block ends, even if the
    run deletes the checkpoint."""
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
    except OSError:  # the file system does not support hard links
        shutil.copy2(path, other)


def mirror_of(run: RunConfig) -> Mirror | None:
    """Return the mirror at run.mirror of the recipe; None if it is not set. Raises ConfigError."""
    return Mirror(run.mirror, run.keep) if run.mirror else None


def latest_of(checkpoints: Path, mirror: Mirror | None) -> Checkpoint:
    """Return the newest complete checkpoint in the folder `checkpoints`. If the mirror has a newer one, copy it to the
    folder first. Raises CheckpointError if there is none."""
    if mirror:
        try:
            done = latest(checkpoints).state["step"]
        except CheckpointError:
            done = 0
        mirror.fetch(checkpoints, newer_than=done)
    return latest(checkpoints)
