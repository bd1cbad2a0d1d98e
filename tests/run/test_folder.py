"""A run's folder: it has one run at a time, and files of others are kept."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import tiny_config, train

from tlt.config import Config, ConfigError
from tlt.config.sections import RunConfig
from tlt.data.prompts import DataError
from tlt.loop import StepResult
from tlt.metrics import read_metrics
from tlt.models.model_folder import ModelError
from tlt.rewards import RewardError
from tlt.rewards.isolated import IsolatedScore
from tlt.rl.policy import Update
from tlt.run.display import Display
from tlt.run.folder import OnSave, RunFolder
from tlt.stopping import stop_request
from tlt.store import checkpoint


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two steps, saved at its end."""
    home = tmp_path_factory.mktemp("sound")
    train(short(home))
    return home


@pytest.fixture
def home(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "home", symlinks=True))


def short(home: Path, **sections: dict[str, Any]) -> Config:
    return tiny_config(home, **{"rollout": {"max_new_tokens": 4}} | sections)


def afresh(home: Path, **sections: dict[str, Any]) -> Config:
    run = {"overwrite": True} | sections.pop("run", {})
    return short(home, run=run, **sections)


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".tlt.lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


class Failing(Display):
    """Display that raises when a phase of a step begins."""

    def __init__(self, step: int, phase: str) -> None:
        super().__init__(Console(quiet=True))
        self.when = step, phase

    def phase(self, step: int, name: str, total: int) -> None:
        if (step, name) == self.when:
            raise ValueError("what went wrong")


@contextmanager
def failing(note: str = "", kind: type[Exception] = ValueError, what: str = "what went wrong") -> Iterator[None]:
    """Expect an error with one note."""
    with pytest.raises(kind, match=what) as error:
        yield
    (found,) = error.value.__notes__
    assert re.match(note, found)


def test_a_second_run_in_the_folder_is_refused_until_the_first_has_ended(home: Path) -> None:
    said = rf"another run uses .*run \(process {os.getpid()} on .+\): wait .*--run\.folder"

    class Second(Display):
        def step(self, result: StepResult) -> None:
            for resume in (False, True):
                with pytest.raises(ConfigError, match=said):
                    train(afresh(home), resume=resume)

    train(afresh(home), display=Second(Console(quiet=True)))
    assert [line["step"] for line in read_metrics(home / "run")] == [1, 2]
    train(afresh(home))


def test_a_folder_made_for_a_run_that_never_began_is_removed(home: Path, tmp_path: Path) -> None:
    for was_there in (False, True):
        with pytest.raises(ModelError):
            train(short(home, model={"path": "nowhere"}, run={"folder": str(tmp_path / "new")}))
        assert (tmp_path / "new").exists() == was_there
        (tmp_path / "new").mkdir(exist_ok=True)


@pytest.mark.parametrize(
    "broken",
    [
        *[{"reward": {"name": "tiny_rewards:none"}}, {"model": {"path": "nowhere"}}],
        *[{"data": {"path": "nowhere.jsonl"}}, {"data": {"max_prompt_tokens": 1}}],
    ],
    ids=str,
)
def test_a_recipe_that_does_not_start_changes_nothing_of_the_previous_run(home: Path, broken: dict[str, Any]) -> None:
    before = files(home / "run")
    with pytest.raises((RewardError, DataError, ModelError)):
        train(afresh(home, **broken))
    assert files(home / "run") == before
    with RunFolder(afresh(home).run, resume=False):
        assert files(home / "run") == before, "the folder is free"


def test_a_new_run_deletes_what_the_previous_one_wrote_and_nothing_else(home: Path) -> None:
    (home / "run" / "notes.txt").write_text("mine", encoding="utf-8")
    (home / "run" / "checkpoints" / "old").mkdir()
    with failing("nothing is saved yet$"):
        train(afresh(home), display=Failing(0, "update"))
    assert not (home / "run" / "checkpoints").exists()
    train(short(home))  # without a step and a checkpoint there is nothing to overwrite
    left = ".tlt.lock latest report.html config.json reward.log metrics.jsonl completions.jsonl summary.json trace.json"
    names = {*left.split(), "notes.txt", "checkpoints", "tensorboard"}
    assert {path.name for path in (home / "run").iterdir()} == names


@pytest.mark.parametrize("name", ["checkpoints/best", "drafter/eagle", "metrics.jsonl", "config.json", "reward.log"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_files_that_no_run_wrote_are_refused_by_name_and_kept(tmp_path: Path, name: str, overwrite: bool) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("somebody's", encoding="utf-8")
    said = re.escape(f"{tmp_path / name.split('/')[0]} is not from a run of tlt: move it away")
    for _ in range(2):  # a refusal leaves nothing behind
        with pytest.raises(ConfigError, match=said):
            RunFolder(RunConfig(folder=str(tmp_path), overwrite=overwrite), resume=False)
    assert path.read_text(encoding="utf-8") == "somebody's"


def test_a_model_in_the_folder_is_kept(home: Path) -> None:
    before = files(home / "model")
    with pytest.raises(ConfigError, match=r"model/config\.json is not from a run of tlt"):
        train(short(home, run={"folder": str(home / "model")}))
    assert files(home / "model") == before


def test_another_file_named_latest_is_kept(home: Path) -> None:
    shutil.rmtree(home / "run")
    (home / "run" / "latest").mkdir(parents=True)
    train(short(home))
    assert ((home / "run" / "latest").is_dir(), (home / "run" / "latest").is_symlink()) == (True, False)


def test_a_run_that_failed_in_its_first_step_is_started_again_by_the_same_command(tmp_path: Path) -> None:
    with failing("nothing is saved yet$"):
        train(short(tmp_path), display=Failing(0, "update"))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b""
    assert train(short(tmp_path))["steps"] == 2


def test_a_folder_with_an_incomplete_checkpoint_alone_belongs_to_no_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".step_00000001.partial").mkdir(parents=True)
    (tmp_path / ".tlt.lock").touch()
    RunFolder(RunConfig(folder=str(tmp_path)), resume=False).close()


@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_a_run_that_ends_with_an_error_is_saved_and_resumes_to_the_same_end(home: Path, phase: str) -> None:
    steps = {"train": {"steps": 3}}
    expected = train(afresh(home, **steps))["policy_sha256"]
    with failing(f"saved after step 2 in {home / 'run'}: continue with --resume$"):
        train(afresh(home, **steps), display=Failing(2, phase))
    summary = train(short(home, **steps), resume=True)
    assert (summary["policy_sha256"], summary["steps"]) == (expected, 3)


def test_an_error_during_an_update_keeps_the_previous_checkpoint(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights then belong to no step."""
    real, calls = Update._optimizer_step, count(1)

    def fails(self: Update, *arguments: Any) -> dict[str, Any]:
        if next(calls) == 8:  # the second of the fourth step
            raise ValueError("what went wrong")
        return real(self, *arguments)

    monkeypatch.setattr(Update, "_optimizer_step", fails)
    with failing(f"saved after step 2 in {home / 'run'}: continue with --resume$"):
        train(afresh(home, train={"steps": 4, "updates_per_step": 2}, run={"save_every": 2}))
    found = checkpoint.latest(home / "run" / "checkpoints")
    assert found.state["step"] == 2
    assert [path.name for path in found.folder.parent.iterdir()] == ["step_00000002"]


def test_a_reward_process_that_cannot_be_restarted_loses_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = IsolatedScore._start, []

    def starts_once(self: IsolatedScore) -> None:
        if started:
            raise RewardError("it cannot start")
        started.append(self)
        start(self)

    class Ending(Display):
        def phase(self, step: int, name: str, total: int) -> None:
            if (step, name) == (1, "rollout"):
                started[0].close()

    monkeypatch.setattr(IsolatedScore, "_start", starts_once)
    with failing(f"saved after step 1 in {home / 'run'}: continue with --resume$", RewardError, "it cannot start"):
        train(afresh(home), display=Ending(Console(quiet=True)))


def test_an_ignored_signal_stays_ignored() -> None:
    """nohup tlt train ... &"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_request(60.0) as stop:
            stop.begun = True
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("save_every", "left"), [(0, "nothing is saved yet"), (1, "saved after step 1 in ")])
def test_an_error_whose_state_cannot_be_saved_names_what_is_left(
    home: Path, monkeypatch: pytest.MonkeyPatch, save_every: int, left: str
) -> None:
    real, saved = checkpoint.save, []

    def save(*arguments: Any) -> Path:
        if len(saved) == save_every:
            raise checkpoint.CheckpointError("the disk is full")
        saved.append(real(*arguments))
        return saved[-1]

    monkeypatch.setattr(checkpoint, "save", save)
    display = Failing(1, "save") if save_every else Failing(2, "rollout")
    with failing(rf"the newest steps cannot be saved \(the disk is full\); {left}"):
        train(afresh(home, train={"steps": 3}, run={"save_every": save_every}), display=display)


@pytest.mark.parametrize(("umask", "mode"), [(0o027, 0o640), (0o002, 0o664)])
def test_files_have_the_permissions_of_the_umask(tmp_path: Path, home: Path, umask: int, mode: int) -> None:
    shutil.rmtree(home / "run")
    before = os.umask(umask)
    try:
        train(afresh(home))
    finally:
        os.umask(before)
    paths = [path for path in (home / "run" / "checkpoints").rglob("*") if path.is_file()]
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (*paths, home / "run" / ".tlt.lock")}
    assert set(found.values()) == {mode}
    assert {"model.safetensors", "optimizer.safetensors"} <= found.keys()


def test_latest_links_to_the_newest_checkpoint(home: Path) -> None:
    train(afresh(home, train={"steps": 3}, run={"save_every": 1, "keep": 1}))
    link = home / "run" / "latest"
    assert os.readlink(link) == "checkpoints/step_00000003"
    assert (link / "policy" / "model.safetensors").is_file()
    shutil.copytree(home / "run", home / "elsewhere", symlinks=True)
    assert (home / "elsewhere" / "latest").resolve() == home / "elsewhere" / "checkpoints" / "step_00000003"


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_saved_policy_has_the_config_of_its_source_and_a_card(home: Path, use_cache: bool) -> None:
    config = home / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"use_cache": use_cache}))
    train(afresh(home, model={"dtype": "bfloat16"}))
    policy = home / "run" / "latest" / "policy"
    saved = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    assert (saved["use_cache"], saved["dtype"]) == (use_cache, "float32")  # the masters
    card = (policy / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: transformers\n")
    said = ("# model, after 2 steps", "tiny_rewards:share_of_low_bytes", "bfloat16 autocast over float32 weights")
    assert all(words in card for words in said)


def test_checkpoints_are_saved_by_default() -> None:
    assert 0 < RunConfig().save_every <= 50


# -- the command after a save ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ('PROGRAM -c "raise SystemExit(3)" {name}', r"run\.on_save ended with exit code 3: .*'step_1'"),
        ("GONE {checkpoint}", r"run\.on_save cannot run \(No such file or directory\): "),
    ],
)
def test_a_command_that_fails_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str, said: str
) -> None:
    gone = tmp_path / "copy"
    gone.symlink_to(sys.executable)
    runner = OnSave(command.replace("PROGRAM", f'"{sys.executable}"').replace("GONE", str(gone)))
    gone.unlink()
    runner.saved(tmp_path / "step_1")
    runner.close()
    assert re.search(said, caplog.text)


@pytest.mark.parametrize("command", ["no-such-program {checkpoint}", "cp 'half"])
def test_a_command_that_cannot_run_ends_the_run_at_its_start(tmp_path: Path, command: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.on_save = .*(names no program|is not a command)"):
        train(tiny_config(tmp_path, run={"on_save": command}))
    assert not (tmp_path / "run").exists()
