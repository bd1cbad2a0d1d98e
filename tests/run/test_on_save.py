"""The user's command after a save: for the newest checkpoint, in the background, and without effect on the run."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tiny import tiny_config, train

from tlt.config import ConfigError
from tlt.run.on_save import OnSave
from tlt.store import checkpoint

COPY = (
    "import pathlib, shutil, sys, time; source, place = map(pathlib.Path, sys.argv[1:]); "
    "time.sleep(len(list(place.iterdir())) == 0); shutil.copytree(source, place / source.name)"
)


def test_a_copy_of_each_run_is_resumed_elsewhere(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    command = f'cp -r {{checkpoint}} "{copies}/{{name}}"'
    expected = train(tiny_config(tmp_path, train={"steps": 3}))["policy_sha256"]
    train(tiny_config(tmp_path, run={"folder": str(tmp_path / "lost"), "on_save": command}))
    assert [path.name for path in copies.iterdir()] == ["step_00000002"]
    assert checkpoint.fault(copies / "step_00000002") is None
    (tmp_path / "fresh").mkdir()
    copies.rename(tmp_path / "fresh" / "checkpoints")
    fresh = tiny_config(tmp_path, train={"steps": 3}, run={"folder": str(tmp_path / "fresh")})
    assert train(fresh, resume=True)["policy_sha256"] == expected


def test_saves_do_not_wait_and_the_newest_is_copied_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    (tmp_path / "script.py").write_text(COPY)
    runner = OnSave(f'"{sys.executable}" "{tmp_path}/script.py" {{checkpoint}} "{tmp_path}/copies"')
    began = time.monotonic()
    for step in range(5):
        (tmp_path / f"step_{step}").mkdir()
        runner.saved(tmp_path / f"step_{step}")
    assert time.monotonic() - began < 0.9, "the first copy takes a second"
    runner.close()
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["step_0", "step_4"]


def test_a_command_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = OnSave(f'"{sys.executable}" -c "raise SystemExit(3)" {{name}}')
    runner.saved(tmp_path / "step_1")
    runner.close()
    assert "run.on_save ended with exit code 3: " in caplog.text
    assert "'step_1'" in caplog.text


def test_a_program_that_disappears_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = tmp_path / "copy"
    program.symlink_to(sys.executable)
    runner = OnSave(f"{program} {{checkpoint}}")
    program.unlink()
    runner.saved(tmp_path / "step_1")
    runner.close()
    assert "run.on_save cannot run (No such file or directory): " in caplog.text


@pytest.mark.parametrize("command", ["no-such-program {checkpoint}", "cp 'half"])
def test_a_command_that_cannot_run_ends_the_run_at_its_start(tmp_path: Path, command: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.on_save = .*(names no program|is not a command)"):
        train(tiny_config(tmp_path, run={"on_save": command}))
    assert not (tmp_path / "run").exists()
