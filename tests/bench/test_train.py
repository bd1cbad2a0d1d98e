"""Whole runs measured in turn: each is an ordinary run, all end with the same tokens, and forks are explained."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import forks
import one_run
import train as bench
from pools import TestPool, ThreadWorker
from tiny import tiny_config
from turns import Pausing, Process

from tlt.cluster.remote import join
from tlt.cluster.sweeper import MARK, marked
from tlt.config import Config, ConfigError
from tlt.draft.eagle import EagleLayer, eagle_options, save_drafter
from tlt.metrics import read_metrics
from tlt.models.loading import make_target

STEPS = 3
REWARD = {"name": "tiny_rewards:share_of_low_bytes", "folder": str(Path(__file__).parent.parent)}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and a random drafter for it."""
    home = tmp_path_factory.mktemp("home")
    target = make_target(tiny_config(home).model)
    save_drafter(EagleLayer(eagle_options(target.options, "eagle3", 16)), home / "drafter")
    return home


def config_of(home: Path, **sections: dict[str, Any]) -> Config:
    training = {"micro_batch_tokens": 8, "buffer_tokens": 64}
    named = {"drafter": "adaptive", "path": str(home / "drafter"), "window": 16, "training": training}
    speculation = named | sections.pop("speculation", {})
    rollout = {"stop_strings": list("abcdefghij ")}
    sections = {"cluster": {"slice_seconds": 1e-9}} | sections  # a round: so that there is time to train beside it
    return tiny_config(home, speculation=speculation, reward=REWARD, rollout=rollout, **sections)


class InThread:
    """Stand-in for a process of the benchmark: a thread, whose workers are objects of this process."""

    def __init__(self, config_file: Path, threads: int, program: str) -> None:
        self.said: Queue[dict[str, float] | None] = Queue()
        self.heard: Queue[None] = Queue()

        def turn(report: dict[str, float]) -> None:
            self.said.put(report)
            self.heard.get()

        def run() -> None:
            try:
                one_run.main(str(config_file), threads, turn)
            finally:
                self.said.put(None)

        Thread(target=run, daemon=True).start()

    def wait(self) -> dict[str, float] | None:
        return self.said.get(timeout=300)

    def go(self) -> None:
        self.heard.put(None)

    def end(self) -> int:
        return 0


def many_workers(config: Config, folder: str | Path, *rest: Any) -> Any:
    size, choose = config.cluster.workers, random.Random(0).randrange
    return join(TestPool(size, lambda i: ThreadWorker.started(config, i, folder), choose), config, *rest)


@pytest.fixture(scope="module")
def result(home: Path) -> dict[str, Any]:
    with (
        patch.object(bench, "Process", InThread),
        patch.object(bench, "_better_shape", lambda *_: 2),
        patch("tlt.run.opening._many_workers", many_workers),
    ):
        bench.bench_train(config_of(home), 2, STEPS, list(bench.MODES), home / "result.json")
    return json.loads((home / "result.json").read_text(encoding="utf-8"))


def test_all_runs_end_in_the_same_policy_without_a_fork(result: dict[str, Any]) -> None:
    assert len({row["policy_sha256"] for row in result["runs"]}) == 1
    assert all(row["forks_explained"] == row["forks_unexplained"] == 0 for row in result["runs"])


def test_modes_with_a_frozen_drafter_do_not_train_it(home: Path, result: dict[str, Any]) -> None:
    spot = {row["name"]: row["seconds"]["spot"] for row in result["runs"]}
    assert spot["plain"] == spot["suffix"] == spot["frozen"] == 0 < spot["spot"]
    lines = read_metrics(Path(config_of(home).run.folder) / "bench" / "spot")
    assert sum(line["rollout"]["drafter_tokens"] for line in lines) > 0


@pytest.fixture(scope="module")
def pair(home: Path) -> tuple[Path, Path, Config]:
    """Return a recorded run with all its policies, and a copy of it."""
    config = bench.mode_config(config_of(home), "plain", 1, STEPS, keep=STEPS, folder="forks")
    folder = Path(config.run.folder)
    folder.mkdir(parents=True)
    (folder / "bench.json").write_text(config.model_dump_json(), encoding="utf-8")
    one_run.main(str(folder / "bench.json"), 1, lambda report: None)
    shutil.copytree(folder, home / "copy")
    return folder, home / "copy", config


def lines_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / forks.FILE).read_text(encoding="utf-8").splitlines()]


def write(copy: Path, lines: list[Any]) -> None:
    (copy / forks.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.mark.parametrize("step", [2, 0])
def test_a_fork_is_checked_at_its_first_step_with_the_policy_before_it(
    pair: tuple[Path, Path, Config], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first response of this step has another token, and later steps have too."""
    plain, copy, config = pair
    lines = lines_of(plain)
    for line in lines[step:]:
        line[0]["responses"][0]["token_ids"][0] = 7
    write(copy, lines)
    found = forks.compare("copy", plain, copy, config)
    assert (found.first, found.explained, found.unexplained) == (step, 0, 1)
    (fork,) = found.forks
    assert (fork.step, fork.position) == (step + 1, 0)
    monkeypatch.setattr(forks, "EXPLAINED_GAP", {"float64": fork.gap * 1.001})
    assert forks.compare("copy", plain, copy, config).explained == 1
    after = plain / "checkpoints" / f"step_{step + 1:08d}" / "policy"
    monkeypatch.setattr(forks, "_policy_before", lambda folder, step, config: after)
    assert fork.gap not in {fork.gap for fork in forks.compare("copy", plain, copy, config).forks}


def test_equal_runs_have_no_fork_and_a_run_that_ends_early_differs(pair: tuple[Path, Path, Config]) -> None:
    plain, copy, config = pair
    write(copy, lines_of(plain))
    assert forks.compare("copy", plain, copy, config) == forks.Comparison(None)
    write(copy, lines_of(plain)[:-1])
    assert forks.compare("copy", plain, copy, config) == forks.Comparison(STEPS - 1, unexplained=1)


def test_runs_that_cannot_be_compared_are_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.path"):
        bench.bench_train(config_of(home, speculation={"path": None}), 2, 1, ["plain", "frozen"], None)
    with pytest.raises(ConfigError, match="'adaptive'"):
        bench.bench_train(config_of(home, speculation={"drafter": "suffix"}), 2, 1, ["plain"], None)


@pytest.mark.slow
def test_a_process_takes_turns_and_ends_with_its_parent(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, reward=REWARD, train={"steps": 2, "learning_rate": 1e-3}, run={"save_every": 1})
    (tmp_path / "bench.json").write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
    run = Process(tmp_path / "bench.json", 1)
    assert run.wait() == {}
    told = []
    for _ in range(2):
        run.go()
        report = run.wait()
        assert report
        told.append(report["seconds"])
    run.go()
    assert run.wait() is None
    assert run.end() == 0
    lines = [line["seconds"] for line in read_metrics(Path(config.run.folder))]
    assert all(seconds["save"] > 0 for seconds in lines)
    assert told == pytest.approx([seconds["total"] - seconds["save"] for seconds in lines], abs=1e-6)
    left = Process(tmp_path / "bench.json", 1)
    assert left.end() == -9


def test_a_run_does_nothing_between_its_turns() -> None:
    with subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: "/tmp/of_this_test"}) as ray:
        states: list[str] = []

        def state() -> str:
            time.sleep(0.1)
            return Path(f"/proc/{ray.pid}/stat").read_text().rsplit(") ", 1)[1][0]

        def turn(report: dict[str, float]) -> None:
            states.append(state())
            if len(states) > 1:
                sys.exit("gone")

        while ray.pid not in marked("/tmp/of_this_test"):
            time.sleep(0.01)
        pausing = Pausing(turn)
        pausing.folder = "/tmp/of_this_test"
        pausing({})
        states.append(state())
        with pytest.raises(SystemExit, match="gone"):
            pausing({})
        states.append(state())
        ray.kill()
    assert states == ["T", "S", "T", "S"]
