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
from tlt.run.display import Display
from tlt.stopping import Stopped

SUMMARY: dict[str, Any] = {
    "steps": 2,
    "compared": {
        **{"rollout_seconds": 8.0, "plain_seconds": 16.0, "differ": 0, "responses": 8, "steps": 2},
        "times": [2.5, 1.5],
    },
    **{"exact": False, "exactness": "not exact: attention"},
    "seconds": {"rollout": 8.0, "reward": 0.5, "update": 3.0, "sync": 0.5, "save": 99.0, "eval": 99.0},
}


COMPARED = {"compare_every": 1}


def test_the_expected_times_by_hand() -> None:
    """A step has 4 s of rollout (8 s with plain decoding), and 2 s of other phases. Saving is not part of a step."""
    said = expected(SUMMARY, 600)
    assert said == [
        "measured on 2 steps, same tokens:",
        "  rollout   4.0 s per step, 8.0 s with plain decoding: 2.00 times as fast (1.50 to 2.50 in single steps)",
        "  the rest  2.0 s per step (reward, update, sync)",
        "  a step    6.0 s: 1.67 times as fast as with plain decoding",
        "600 steps would take 1:00:00, with plain decoding 1:40:00; evaluations and saves come on top",
    ]


def test_a_small_gain_is_explained() -> None:
    update_bound = expected({**SUMMARY, "seconds": {**SUMMARY["seconds"], "update": 30.0}}, 10)
    assert "decoding is less than half of a step" in update_bound[-1]
    no_gain = expected({**SUMMARY, "compared": {**SUMMARY["compared"], "plain_seconds": 8.0}}, 10)
    assert "tlt draft train" in no_gain[-1]


def test_responses_that_differ_are_counted_with_the_reason() -> None:
    compared = {**SUMMARY["compared"], "differ": 3}
    lines = expected({**SUMMARY, "steps": 1, "compared": compared}, 1)
    assert lines[0] == "measured on 1 step, 3 of 8 responses differ:"
    assert lines[4].startswith("1 step would take")
    assert lines[5] == "not exact: attention. The two times are of different responses"


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


def test_a_recipe_is_measured_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held-out prompts are not decoded: their file does not even exist. Nothing is copied or tracked, and no line names
    a file that is deleted."""
    run = {"on_save": f"touch {tmp_path}/saved", "trackers": ["wandb"]}
    tree = tiny_tree(tmp_path, run=run, eval={"every": 1, "path": "missing.jsonl"})
    recipe, before = write_recipe(tmp_path / "recipe.toml", tree), sorted(tmp_path.iterdir())
    with patch.dict(sys.modules, {"wandb": None}), pytest.raises(SystemExit) as ended:
        cli.main(["estimate", str(recipe), "--steps", "2"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "measured on 2 steps, same tokens:" in said
    assert "2 steps would take" in said
    assert "tlt-estimate-" not in said
    assert sorted(tmp_path.iterdir()) == before


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
