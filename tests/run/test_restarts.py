"""Runs that restart by themselves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from test_recovery import recovery

from tlt.cli import main
from tlt.metrics import read_metrics
from tlt.run import restarts
from tlt.run.restarts import keep_running


class Runs:
    """Child processes with given exit codes, each with or without a new checkpoint. The last one may have received a
    signal."""

    def __init__(self, folder: Path, ends: list[tuple[int, bool]], asked: bool = False) -> None:
        self.folder, self.ends, self.given, self.asked = folder, ends, [], asked
        self.pauses: list[float] = []

    def __call__(self, arguments: list[str]) -> tuple[int, bool]:
        self.given.append(arguments)
        code, saved = self.ends[len(self.given) - 1]
        if saved:
            (self.folder / f"step_{len(self.given):08d}").mkdir(parents=True)
        return code, self.asked and len(self.given) == len(self.ends)


@pytest.mark.parametrize(
    ("ends", "code", "pauses"),
    [
        ([(0, True)], 0, []),
        ([(2, False)], 2, []),
        ([(143, True)], 143, []),
        ([(-9, False), (75, False), (0, False)], 0, [5.0, 10.0]),
        ([(-9, False), (75, False), (-6, False)], 134, [5.0, 10.0]),
        ([(75, True), (75, True), (75, True), (1, False), (0, False)], 0, [5.0, 5.0, 5.0, 10.0]),
    ],
)
def test_a_run_is_restarted_while_it_makes_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Any, code: int, pauses: Any
) -> None:
    runs = Runs(tmp_path, ends)
    monkeypatch.setattr(restarts, "_run", runs)
    assert keep_running(["train", "r.toml"], 2, tmp_path, runs.pauses.append) == code
    assert runs.pauses == pauses
    assert len(runs.given) == len(ends)
    assert runs.given[0] == ["train", "r.toml", "--restarts", "0"]
    assert all(given[-2:] == ["--resume", "auto"] for given in runs.given[1:])


@pytest.mark.parametrize(("code", "end"), [(-15, 143), (15, 15), (75, 75)])
def test_a_run_stopped_by_a_signal_is_not_restarted(tmp_path: Path, monkeypatch: Any, code: int, end: int) -> None:
    runs = Runs(tmp_path, [(-9, False), (code, False)], asked=True)
    monkeypatch.setattr(restarts, "_run", runs)
    assert keep_running(["train"], 5, tmp_path, runs.pauses.append) == end
    assert len(runs.given) == 2


def test_the_previous_run_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with `--run.overwrite true` is killed before it moves the previous one away. Later it has a checkpoint of
    its own."""
    (tmp_path / "step_00000900").mkdir()
    runs = Runs(tmp_path, [(-9, False), (-9, True), (0, False)])
    monkeypatch.setattr(restarts, "_run", runs)
    assert keep_running(["train"], 5, tmp_path, runs.pauses.append) == 0
    assert ["--resume" in given for given in runs.given] == [False, False, True]


KILLS_ITS_RUN = """
import os, signal
from pathlib import Path

ONCE = Path(__file__).with_suffix(".once")

def reward(prompt, answer):
    if ONCE.with_name("run").joinpath("checkpoints", "step_00000002").exists() and not ONCE.exists():
        ONCE.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    return sum(char < "m" for char in answer) / max(1, len(answer))
"""


def test_a_killed_run_restarts_and_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    (tmp_path / "kills.py").write_text(KILLS_ITS_RUN)
    own = {"reward": {"name": "kills:reward", "folder": str(tmp_path)}, "train": {"steps": 5}}
    path = recovery.write_recipe(tmp_path, **own)
    command = [sys.executable, "-m", "tlt", "train", str(path), "--restarts", "3"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("tlt: the run was killed by SIGKILL; restart 1 of 3 in 5 s") == 1
    assert (tmp_path / "kills.once").exists()
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    expected = recovery.train_here(path, tmp_path / "whole", steps=5)
    assert found["policy_sha256"] == expected["policy_sha256"]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(5))


def test_resume_auto_starts_a_run_without_checkpoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = recovery.write_recipe(tmp_path, train={"steps": 1})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')  # of one that was killed before it saved
    with pytest.raises(SystemExit) as ended:
        main(["train", str(path), "--resume", "auto"])
    assert ended.value.code == 0
    assert "there is no checkpoint in" in capfd.readouterr().out
    assert (folder / "latest").resolve().name == "step_00000001"


def started(tmp_path: Path) -> subprocess.Popen[str]:
    """Start a run that would take hours."""
    path = recovery.write_recipe(tmp_path, train={"steps": 100000})
    command = [sys.executable, "-m", "tlt", "train", str(path), "--restarts", "3"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_sigterm_reaches_the_run(tmp_path: Path) -> None:
    process = started(tmp_path)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoints" / "step_00000002").exists() and time.monotonic() < until:
            time.sleep(0.1)
        process.terminate()
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM and saved after step" in said


def test_an_ignored_hangup_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process has no handler of ours: nohup tlt train --restarts 3 &"""
    child, before = Mock(), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    child.return_value.wait = lambda: signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(subprocess, "Popen", child)
    try:
        assert restarts._run(["train"]) == (signal.SIG_IGN, False)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigterm_ends_a_run_before_it_has_signal_handlers(tmp_path: Path) -> None:
    """The signal kills the run during its imports. This does not count as a lost run."""
    process = started(tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and not children.read_text():
        time.sleep(0.001)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert said == "tlt: the run was killed by SIGTERM after a signal asked it to stop\n"
