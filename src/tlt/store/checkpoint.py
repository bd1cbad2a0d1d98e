"""Checkpoints of a run. A checkpoint is written to a temporary folder, hashed, flushed to disk and renamed. Its file
manifest.json has the sha256 of all files, which shows whether the checkpoint is complete.

A checkpoint contains policy/ (a folder that transformers can load), optimizer.safetensors, state.json, and
history.safetensors (the last responses to each prompt)."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from tlt.files import flush, read_json, share

MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """Error of a checkpoint that cannot be loaded or saved. The message names the folder and the remedy."""


class Checkpoint(NamedTuple):
    folder: Path
    state: dict[str, Any]
    passed_over: tuple[str, ...] = ()
    """newer checkpoints that were skipped because they are damaged, each with its fault"""


def save(root: Path, step: int, state: dict[str, Any], write: Callable[[Path], None], keep: int) -> Path:
    """Save a checkpoint after `step` steps in the folder `root`, and return its folder. `write` writes the policy and
    the optimizer into a folder. Then delete all but the newest `keep` checkpoints.

    Raises CheckpointError if the disk is full or fails. Earlier checkpoints are then kept."""
    final, draft = root / f"step_{step:08d}", root / f".step_{step:08d}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_partial(root)
        _fill(draft, state, write)
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        flush(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{final} cannot be saved ({reason}): free disk space, or repair the disk") from error
    # A checkpoint with more steps is damaged, because this run was resumed from an older one. `keep` does not count it.
    for old in [folder for folder in _folders(root) if folder <= final][:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def refuse_full_disk(root: Path, num_weights: int, bytes_each: int) -> None:
    """Delete the files that a killed save has left in the run's folder `root`. Then raise CheckpointError if the disk
    of the folder has no room for a checkpoint. A checkpoint has the weights and Adam's two moments: three numbers of
    `bytes_each` bytes per weight."""
    _remove_partial(root / "checkpoints")
    needed, free = 3 * num_weights * bytes_each, shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(
            f"a checkpoint needs at least {needed / 2**30:.2f} GiB, and the disk of {root} has {free / 2**30:.2f} GiB "
            "free: free disk space, or set run.folder to a folder on another disk"
        )


def _remove_partial(root: Path) -> None:
    """Delete the partial checkpoints of killed saves in the folder of checkpoints `root`."""
    for left_over in root.glob(".step_*.partial"):
        shutil.rmtree(left_over, ignore_errors=True)


def _fill(draft: Path, state: dict[str, Any], write: Callable[[Path], None]) -> None:
    draft.mkdir()
    write(draft)
    (draft / "state.json").write_text(json.dumps(state), encoding="utf-8")
    files = sorted(p for p in draft.rglob("*") if p.is_file())
    manifest = {str(p.relative_to(draft)): _sha256(p) for p in files}
    (draft / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    share(draft)
    for path in [*files, draft / MANIFEST, draft / "policy", draft]:
        flush(path)


def latest(root: Path) -> Checkpoint:
    """Return the newest checkpoint in `root` whose files match its manifest. Raises CheckpointError if none does."""
    damaged = []
    for folder in reversed(_folders(root)):
        found = fault(folder)
        if found is None:
            return Checkpoint(folder, json.loads((folder / "state.json").read_text(encoding="utf-8")), tuple(damaged))
        damaged.append(f"{folder.name} ({found})")
    if damaged:
        remedy = "train without --resume, in another run.folder or with --run.overwrite true"
        raise CheckpointError(f"there is no complete checkpoint in {root}; damaged: {', '.join(damaged)}: {remedy}")
    raise CheckpointError(f"there is no checkpoint in {root}: give the folder of a run that has one")


def policy_in(folder: str | Path) -> Path:
    """Return the folder of a policy that transformers can load. If `folder` is the folder of a run, this is the policy
    in its newest complete checkpoint; if it is a checkpoint, the policy in it; otherwise `folder` itself. Raises
    CheckpointError."""
    path = Path(folder)
    if is_of_run(path):
        return latest(path / "checkpoints").folder / "policy"
    return path / "policy" if (path / "policy" / "config.json").is_file() else path


def is_of_run(path: Path) -> bool:
    """Return whether a path is the folder of a run."""
    return (path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file()


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.glob(f"step_{'[0-9]' * 8}") if p.is_dir())


def fault(folder: Path) -> str | None:
    """Return a description of the damage of a checkpoint; None if it is complete."""
    try:
        manifest = read_json(folder / MANIFEST)
        if not _lists_all(manifest):
            return "manifest.json does not list all files of a checkpoint"
        return next(
            (f"{name} is damaged" for name, digest in manifest.items() if _sha256(folder / name) != digest), None
        )
    except (OSError, ValueError) as error:
        return str(error).replace(f"{folder}/", "")


def _lists_all(manifest: dict[str, Any]) -> bool:
    weights = any(name.startswith("policy/") and name.endswith(".safetensors") for name in manifest)
    return weights and {"state.json", "optimizer.safetensors"} <= manifest.keys()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def offer_best(
    root: Path, step: int, evaluation: dict[str, float], worth: float, write: Callable[[Path], None]
) -> None:
    """Save the policy after `step` steps in the folder `root`, if its score `worth` (mean reward) is higher than that
    of the policy in it, which is then deleted. The initial policy (step 0) is never saved. Raises CheckpointError."""
    if not step or worth <= max(map(_worth, _folders(root)), default=-math.inf):
        return
    best = save(root, step, {"step": step, "worth": worth, "eval": evaluation}, write, keep=1)
    for other in _folders(root):  # a run that was resumed from an older checkpoint may have left one of a later step
        if other != best:
            shutil.rmtree(other, ignore_errors=True)


def _worth(folder: Path) -> float:
    """Return the score of a policy that `offer_best` has saved. Its weights, which may be large, are not read."""
    try:
        return read_json(folder / "state.json")["worth"]
    except (OSError, ValueError, KeyError):  # the file is damaged
        return -math.inf
