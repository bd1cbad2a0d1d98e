"""Results of `tlt estimate`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console
from tiny import tiny_config, tiny_tree, write_recipe

from tlt import cli
from tlt.commands.estimate import estimate, expected
from tlt.config import ConfigError
from tlt.gain import gain_of
from tlt.run.display import Display
from tlt.stopping import Stopped

COMPARED = {"compare_every": 1}


def line(step: int, rollout: float = 4.0, plain: float = 8.0, update: float = 1.5, **others: Any) -> dict[str, Any]:
    """Return the metrics of a step with 2 s of other phases. Saving and evaluations are not part of a step."""
    seconds = {"rollout": rollout, "compare": plain, "reward": 0.25, "update": update, "sync": 0.25}
    rollouts = {"draft_passes": 10, "accepted": 20}
    return {"step": step + 1, "seconds": {**seconds, "save": 99.0, "eval": 99.0}, "rollout": rollouts, **others}


def said(lines: list[dict[str, Any]], steps: int = 600, differ: int = 0) -> list[str]:
    gain = gain_of(lines)
    assert gain
    compared = {"differ": differ, "responses": 8}
    summary = {"compared": compared, "gain": gain._asdict(), "exact": False, "exactness": "not exact: attention"}
    return expected(summary, lines, steps)


def test_the_expected_times_by_hand() -> None:
    """A step has 4 s of rollout (8 s with plain decoding), and 2 s of other phases."""
    lines = [line(0), line(1, plain=8.4), line(2, plain=7.6), line(3)]
    assert said(lines) == [
        "measured on 3 steps after the first, same tokens:",
        "  rollout   4.0 s per step, 8.0 s with plain decoding",
        "  the rest  2.0 s per step (reward, update, sync)",
        "  start-up  0.0 s once",
        "rollouts were 2.00 times as fast as plain decoding (median; 1.90 to 2.10 times in 3 steps)",
        "a step takes 6.0 s, 1.67 times as fast as with plain decoding",
        "600 steps would take 1:00:00, with plain decoding 1:40:00; evaluations and saves come on top",
    ]


def test_the_start_up_is_counted_once() -> None:
    """The first rollout took 30 s more, because it measured the drafters. It was charged to each of the steps."""
    lines = [line(0, rollout=34.0), line(1, plain=8.4), line(2, plain=7.6), line(3)]
    assert "  start-up  30.0 s once" in said(lines)
    assert said(lines)[-1].startswith("600 steps would take 1:00:30, with plain decoding 1:40:00;")


def test_the_time_of_plain_decoding_follows_from_the_claimed_gain() -> None:
    """The seconds say 2.00. The accept length is 1.50, so a plain step takes at most 4 x 1.5 + 2 = 8 s."""
    lines = said([line(step) | {"rollout": {"draft_passes": 10, "accepted": 5}} for step in range(4)])
    assert lines[-2:] == [
        "a step takes 6.0 s, 1.33 times as fast as with plain decoding",
        "600 steps would take 1:00:00, with plain decoding 1:20:00; evaluations and saves come on top",
    ]


def test_a_single_step_claims_nothing() -> None:
    lines = said([line(0, rollout=34.0), line(1)])
    assert lines[0] == "measured on 1 step after the first, same tokens:"
    assert "no gain over plain decoding was measured (2.00 to 2.00 times in 1 step): a gain needs 3 compar" in lines[4]
    assert lines[5] == "600 steps would take 1:00:30; evaluations and saves come on top"


def test_busy_cores_leave_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    used = {"cpu_seconds": 1.0, "cpu_wait_seconds": 1.0}
    lines = [line(step, energy={"phases": {"compare": used, "rollout": used}}) for step in range(4)]
    header, warning = said(lines)
    assert header == "measured on 3 steps after the first, same tokens:"
    assert "cannot be trusted: the run's threads waited 50% of their time" in warning
    assert "OMP_NUM_THREADS=1" in warning


def test_a_small_gain_is_explained() -> None:
    update_bound = said([line(step, update=30.0) for step in range(4)])
    assert "decoding is less than half of a step" in update_bound[-1]
    no_gain = said([line(step, plain=4.0) for step in range(4)])
    assert "tlt draft train" in no_gain[-1]
    assert "no gain over plain decoding was measured" in no_gain[4]


def test_responses_that_differ_are_counted_with_the_reason() -> None:
    lines = said([line(0), line(1)], 1, differ=3)
    assert lines[0] == "measured on 1 step after the first, 3 of 8 responses differ:"
    assert lines[5].startswith("1 step would take")
    assert lines[6] == "not exact: attention. The two times are of different responses"


def test_a_stopped_estimate_keeps_nothing(tmp_path: Path) -> None:
    class Stopping(Display):
        def phase(self, step: int, name: str, total: int) -> None:
            if name == "update":
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped, match=r"^stopped before all steps were measured: nothing is kept$") as stopped:
        estimate(tiny_config(tmp_path, run=COMPARED), 2, Stopping(Console(quiet=True)))
    assert stopped.value.exit_code == 130


def test_an_error_does_not_say_how_to_resume_from_the_deleted_folder(tmp_path: Path) -> None:
    class Failing(Display):
        def phase(self, step: int, name: str, total: int) -> None:
            if step == 1:
                raise ValueError("the second step fails")

    with pytest.raises(ValueError, match="the second step fails") as failed:
        estimate(tiny_config(tmp_path, run=COMPARED), 2, Failing(Console(quiet=True)))
    assert failed.value.__notes__ == []


def test_a_recipe_is_measured_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out prompts are not decoded: their file does not even exist. Nothing is copied or tracked, and no line names
    a file that is deleted."""
    run = {"on_save": f"touch {tmp_path}/saved", "trackers": ["wandb"]}
    tree = tiny_tree(tmp_path, run=run, train={"steps": 7}, eval={"every": 1, "path": "missing.jsonl"})
    recipe, before = write_recipe(tmp_path / "recipe.toml", tree), sorted(tmp_path.iterdir())
    monkeypatch.setattr("tlt.gain._BUSY", 2.0)  # tests may run on a busy machine
    with patch.dict(sys.modules, {"wandb": None}), pytest.raises(SystemExit) as ended:
        cli.main(["estimate", str(recipe), "--steps", "2"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "measured on 2 steps after the first, same tokens:" in printed
    assert "7 steps would take" in printed
    assert "tlt-estimate-" not in printed
    assert sorted(tmp_path.iterdir()) == before


def test_the_option_sets_the_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("tlt.commands.estimate.estimate", lambda config, *_: asked.append(config.cluster.workers) or ())
    with pytest.raises(SystemExit):
        cli.main(["estimate", str(write_recipe(tmp_path / "recipe.toml", tiny_tree(tmp_path))), "--workers", "3"])
    assert asked == [3]


def test_the_temporary_folder_is_on_the_disk_of_the_runs_folder(tmp_path: Path) -> None:
    """An error may advise another run.folder if the disk is full."""

    class Full(Display):
        def note(self, text: str) -> None:
            raise ValueError(text)

    (tmp_path / "disk").mkdir()
    for folder in ("disk", "disk/runs/mine"):
        config = tiny_config(tmp_path, run=COMPARED | {"folder": str(tmp_path / folder)})
        with pytest.raises(ValueError, match=rf"^writes to {tmp_path}/disk/tlt-estimate-"):
            estimate(config, 2, Full(Console(quiet=True)))
    config = tiny_config(tmp_path, run=COMPARED | {"folder": "/proc/run"})
    with pytest.raises(ConfigError, match=r"^/proc cannot be written to \(.*\): set another --run\.folder$"):
        estimate(config, 2, Full(Console(quiet=True)))
