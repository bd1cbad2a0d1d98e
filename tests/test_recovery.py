"""A run interrupted at any point of a save, or killed in a real process, resumes to the same end."""

from __future__ import annotations

import errno
import re
import shutil
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import load_script

from tlt.config import load_config
from tlt.models.weights import read_safetensors
from tlt.run import opening
from tlt.run import train as run_module
from tlt.run.display import Display
from tlt.run.folder import RunFolder
from tlt.store.checkpoint import CheckpointError, latest

recovery = load_script(Path(__file__).parent.parent / "bench" / "recovery.py")


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    recovery.write_recipe(home, train={"steps": 4})
    return home


class Saving:
    """Run that has saved steps 1 and 2. One of its weights is the number of the step."""

    def __init__(self, home: Path, name: str) -> None:
        self.root = home / name / "checkpoints"
        config = load_config(home / "recipe.toml", ["--run.folder", str(home / name), "--run.keep", "2"])
        folder = RunFolder(config.run, resume=False)
        self.run = opening._prepare(config, folder, Display(Console(quiet=True)), None, ExitStack())
        for step in (1, 2):
            self.save(step)

    def save(self, step: int) -> None:
        self.run.policy.state_dict()["model.embed_tokens.weight"][0, 0] = float(step)
        self.run.step_ended(step, {"step": step - 1})
        run_module._save(self.run)

    def found(self) -> int:
        """Return the step of the checkpoint that a resumed run would use."""
        checkpoint = latest(self.root)
        step = checkpoint.state["step"]
        assert read_safetensors(checkpoint.folder / "policy")["model.embed_tokens.weight"][0, 0] == step
        return step

    def names(self) -> list[str]:
        return sorted(p.name for p in self.root.iterdir())


@pytest.fixture(scope="module")
def saving(home: Path) -> Saving:
    return Saving(home, "saving")


def test_a_save_may_be_interrupted_at_any_write_flush_rename_or_unlink(saving: Saving, tmp_path: Path) -> None:
    shutil.copytree(saving.root, tmp_path / "before")

    def cut_short(at: int) -> Any:
        shutil.rmtree(saving.root)
        shutil.copytree(tmp_path / "before", saving.root)
        with recovery.faults(at) as found, suppress(recovery.Crash):
            saving.save(3)
        return found

    whole = cut_short(-1)
    assert min(whole.counts[name] for name in ("write", "fsync", "rename", "unlink", "rmdir", "mkdir")) > 0
    assert whole.points > 80
    found = []
    for at in range(whole.points):
        cut_short(at)
        found.append(saving.found())
        if at % 8 == 0:
            saving.save(3)
            assert saving.found() == 3
            assert saving.names() == ["step_00000002", "step_00000003"]
    assert found == sorted(found)  # one moment, from which on the new one counts
    assert set(found) == {2, 3}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failing_disk_is_a_named_error_and_the_previous_checkpoint_is_kept(saving: Saving, code: int) -> None:
    def fail() -> None:
        raise OSError(code, "the disk's own words")

    saving.save(2)
    with recovery.faults() as whole:
        saving.save(3)
    shutil.rmtree(saving.root / "step_00000003")
    said = []
    for at in range(0, whole.points, 7):
        try:
            with recovery.faults(at, fail):
                saving.save(3)
            assert saving.found() == 3  # a folder that could not be made because it is there, an old one not removed
        except CheckpointError as error:
            said.append(str(error))
            assert saving.found() in (2, 3)  # 3 where the last flush failed
        assert not list(saving.root.glob(".step_*"))
        shutil.rmtree(saving.root / "step_00000003", ignore_errors=True)
    assert len(said) > 6
    for sentence in said:
        assert re.search(r"step_00000003 cannot be saved .*the disk's own words", sentence)


@pytest.mark.slow
def test_a_real_process_that_is_killed_resumes_to_the_same_end(home: Path) -> None:
    recipe = home / "recipe.toml"
    expected = recovery.train_here(recipe, home / "whole", steps=4)["policy_sha256"]
    found = recovery.at_random_moments(recipe, home, signal.SIGKILL, trials=1, expected=expected, lasts=0.5)
    assert found["ended_equal"] == 1, found


def test_a_resumed_step_may_be_interrupted_anywhere(home: Path, tmp_path: Path) -> None:
    """The whole step with its metrics, interrupted at some of its points. `bench/recovery.py` tests all of them."""
    found = recovery.at_every_point(home / "recipe.toml", tmp_path, most=5)
    assert found["points"] > 80
    assert not found["failed"]
