"""The view of a run for scripts: one JSON object per line. tests/test_cli.py tests the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_closing import SUMMARY
from tiny import tiny_config, train

from tlt.metrics import read_metrics
from tlt.run.display import JsonLines


def test_json_has_an_object_for_each_event_and_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view, config = JsonLines(sys.stdout), tiny_config(tmp_path)
    view.end(train(config, display=view), config.run.folder)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    steps = [event for event in found if event["event"] == "step"]
    assert steps == [{"event": "step"} | line for line in read_metrics(tmp_path / "run")]
    assert [event["event"] for event in found][-3:] == ["step", "step", "end"]
    assert {event["event"] for event in found[:-3]} == {"note"}
    assert f"writes to {tmp_path / 'run'}" in found[0]["text"]
    assert found[-1]["folder"] == str(tmp_path / "run")
    assert "by_step" not in found[-1]
    assert len(found[-1]["policy_sha256"]) == 64


def test_an_evaluation_is_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    view = JsonLines(sys.stdout)
    view.evaluation(3, {"mean@2": 0.5, "length_mean": 9.0})
    view.end(SUMMARY, "runs/x")
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"event": "evaluation", "step": 3, "mean@2": 0.5, "length_mean": 9.0}
    assert (last["event"], last["folder"], last["steps"]) == ("end", "runs/x", 4)
