"""Checkpoints: the last complete one is found. tests/test_recovery.py ends a save at any point."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tlt.store import checkpoint
from tlt.store.checkpoint import CheckpointError, latest, offer_best, policy_in, refuse_full_disk, save


def write_step(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_bytes(bytes([step]) * 8)
        (folder / "optimizer.safetensors").write_bytes(bytes([step + 100]) * 8)

    return write


def save_step(root: Path, step: int, keep: int = 10) -> Path:
    return save(root, step, {"step": step}, write_step(step), keep)


def good_step(root: Path) -> int:
    """Return the step of the checkpoint that is found. All its files must be of that step."""
    found = latest(root)
    step = found.state["step"]
    assert (found.folder / "policy" / "model.safetensors").read_bytes() == bytes([step]) * 8
    assert (found.folder / "optimizer.safetensors").read_bytes() == bytes([step + 100]) * 8
    return step


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_a_saved_checkpoint_is_found_by_its_number(tmp_path: Path) -> None:
    state = {"step": 3, "cursor": {"epoch": 1, "position": 7, "shuffle": True}, "share": 0.1}
    folder = save(tmp_path / "deep" / "er", 3, state, write_step(3), keep=1)
    assert latest(tmp_path / "deep" / "er") == (folder, state, ())
    for step in (10, 9, 100):
        save_step(tmp_path / "several", step)
    os.utime(tmp_path / "several" / "step_00000009")
    assert good_step(tmp_path / "several") == 100


def test_weights_and_two_moments_must_fit_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder left by a killed save is deleted before."""
    left_over = tmp_path / "checkpoints" / ".step_00000003.partial"
    left_over.mkdir(parents=True)

    def usage(path: Path) -> Any:
        free = 3 * 2**30 if path == tmp_path and not left_over.exists() else 0
        return shutil._ntuple_diskusage(0, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    refuse_full_disk(tmp_path, 2**28, 4)
    with pytest.raises(CheckpointError, match=r"needs at least 6\.00 GiB, and the disk of .* has 3\.00 GiB free"):
        refuse_full_disk(tmp_path, 2**28, 8)


def test_a_damaged_or_missing_file_falls_back_to_the_previous_checkpoint(tmp_path: Path) -> None:
    """Any byte is flipped, and any end is cut off."""
    save_step(tmp_path, 1)
    folder = save_step(tmp_path, 2)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert len(paths) == 4
    for path in paths:
        whole = path.read_bytes()
        flipped = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
        for content in flipped + [whole[:i] for i in range(len(whole))]:
            path.write_bytes(content)
            assert good_step(tmp_path) == 1, f"{path}: {content!r}"
        path.unlink()
        assert good_step(tmp_path) == 1, path
        path.write_bytes(whole)
        assert good_step(tmp_path) == 2


@pytest.mark.parametrize(
    "manifest", ["{}", "[]", "3", '{"state.json": 3}', "[" * 100_000, '{"policy": "", "state.json": ""}']
)
def test_a_manifest_that_does_not_list_the_files_is_damaged(tmp_path: Path, manifest: str) -> None:
    save_step(tmp_path, 1)
    (save_step(tmp_path, 2) / "manifest.json").write_text(manifest, encoding="utf-8")
    assert good_step(tmp_path) == 1


def test_a_manifest_that_leaves_a_file_out_is_damaged(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    path = save_step(tmp_path, 2) / "manifest.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    for name in whole:
        path.write_text(json.dumps({key: whole[key] for key in whole if key != name}), encoding="utf-8")
        assert good_step(tmp_path) == 1, name


def test_a_users_copy_next_to_the_checkpoints_is_ignored_and_kept(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    copies = [shutil.copytree(tmp_path / "step_00000001", tmp_path / name) for name in ("step_00000001_copy", "step_9")]
    (tmp_path / "step_notes.txt").write_text("mine", encoding="utf-8")
    for step in (2, 3):
        save_step(tmp_path, step, keep=1)
    assert good_step(tmp_path) == 3
    assert all((copy / "state.json").is_file() for copy in copies)


def test_a_save_never_removes_itself_or_the_last_complete_checkpoint(tmp_path: Path) -> None:
    """After a fall-back there are newer, damaged checkpoints. They must not count among those to keep."""
    save_step(tmp_path, 2)
    (save_step(tmp_path, 8) / "state.json").unlink()
    save_step(tmp_path, 3, keep=1)
    assert good_step(tmp_path) == 3
    (damaged,) = latest(tmp_path).passed_over
    assert re.fullmatch(r"step_00000008 \(.*state\.json.*\)", damaged)


def test_everything_is_flushed_before_the_folder_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real_fsync(handle)

    def rename(source: Path, target: Path) -> Path:
        events.append("rename")
        return real_rename(source, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to name what is flushed")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    save_step(tmp_path / "checkpoints", 1)
    at = events.index("rename")
    flushed = {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json", "policy"}
    assert set(events[:at]) == flushed | {".step_00000001.partial"}
    assert events[at + 1 :] == ["checkpoints"]


@pytest.mark.parametrize(
    "offers",
    [((0, 9.0), (10, 0.5), (20, 0.7), (30, 0.7), (40, 0.6)), ((25, 0.5), (20, 0.7), (30, 0.6))],
    ids=["in order", "resumed from an older checkpoint"],
)
def test_the_best_policy_is_kept(tmp_path: Path, offers: Sequence[tuple[int, float]]) -> None:
    for step, worth in offers:
        offer_best(tmp_path, step, {"mean@2": worth}, worth, write_step(step))
    assert names(tmp_path) == ["step_00000020"]
    assert latest(tmp_path).state == {"step": 20, "worth": 0.7, "eval": {"mean@2": 0.7}}


def test_a_worse_policy_is_refused_without_a_look_at_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_best(tmp_path, 10, {}, 0.7, write_step(10))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_sha256", lambda path: pytest.fail(f"it reads {path}"))
        offer_best(tmp_path, 20, {}, 0.6, write_step(20))
    (tmp_path / "step_00000010" / "state.json").write_text('{"wor', encoding="utf-8")
    offer_best(tmp_path, 30, {}, 0.5, write_step(30))
    assert names(tmp_path) == ["step_00000030"], "the score of a damaged one is unknown"


def test_a_run_without_a_checkpoint_has_no_policy(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        policy_in(tmp_path)
