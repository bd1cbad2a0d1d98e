"""Checkpoints: written to a new folder, flushed, hashed, renamed; the newest whole one is found by its manifest.

A checkpoint holds policy/ (a folder transformers can load), optimizer.safetensors and state.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class CheckpointError(ValueError):
    """No checkpoint to go on from; the message says where it was looked for and what to do."""


class Checkpoint(NamedTuple):
    folder: Path
    state: dict[str, Any]


def save(root: Path, step: int, state: dict[str, Any], write: Callable[[Path], None], keep: int) -> Path:
    """Save after `step` steps; `write` fills the folder it is given. All but the newest `keep` go last."""
    root.mkdir(parents=True, exist_ok=True)
    final, draft = root / f"step_{step:08d}", root / f".step_{step:08d}.partial"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    write(draft)
    (draft / "state.json").write_text(json.dumps(state), encoding="utf-8")
    files = sorted(p for p in draft.rglob("*") if p.is_file())
    manifest = {str(p.relative_to(draft)): _sha256(p) for p in files}
    (draft / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    for path in [*files, draft / "manifest.json", draft / "policy", draft]:
        _flush(path)
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    _flush(root)
    # a newer one is damaged, as this run fell back behind it: it must not push out a good one
    for old in [folder for folder in _folders(root) if folder <= final][:-keep]:
        shutil.rmtree(old)
    return final


def latest(root: Path) -> Checkpoint:
    """The newest checkpoint whose files all match its manifest. Raises CheckpointError if there is none."""
    damaged = []
    for folder in reversed(_folders(root)):
        fault = _fault(folder)
        if fault is None:
            return Checkpoint(folder, json.loads((folder / "state.json").read_text(encoding="utf-8")))
        damaged.append(f"{folder.name} ({fault})")
    found = f"; damaged: {', '.join(damaged)}" if damaged else ""
    raise CheckpointError(
        f"there is no whole checkpoint in {root}{found}: start without --resume in another run.folder"
    )


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.glob("step_*") if p.is_dir())


def _fault(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return next(
            (f"{name} is damaged" for name, digest in manifest.items() if _sha256(folder / name) != digest), None
        )
    except (OSError, ValueError) as error:
        return str(error)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
