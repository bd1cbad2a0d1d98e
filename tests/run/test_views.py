"""Views of a run for scripts: one line, or one JSON object per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_closing import SUMMARY
from tiny import tiny_config

from tlt.metrics import read_metrics
from tlt.run.closing import closing
from tlt.run.train import train
from tlt.run.views import JsonLines, OneLine, open_view


def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool, as_json: bool) -> tuple[list[str], Any]:
    view, config = open_view(quiet, as_json), tiny_config(tmp_path)
    summary = train(config, False, view)
    view.end(summary, config.run.folder)
    return capsys.readouterr().out.splitlines(), summary


def test_quiet_prints_only_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, summary = printed(tmp_path, capsys, quiet=True, as_json=False)
    assert lines == [f"{closing(summary, '')[0].plain}; all files are in {tmp_path / 'run'}"]
    assert isinstance(open_view(True, False), OneLine)


def test_json_has_an_object_for_each_event_and_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [json.loads(line) for line in printed(tmp_path, capsys, quiet=False, as_json=True)[0]]
    steps = [event for event in found if event["event"] == "step"]
    assert steps == [{"event": "step"} | line for line in read_metrics(tmp_path / "run")]
    assert [event["event"] for event in found][-3:] == ["step", "step", "end"]
    assert {event["event"] for event in found[:-3]} == {"note"}
    assert f"writes to {tmp_path / 'run'}" in found[0]["text"]
    assert found[-1]["folder"] == str(tmp_path / "run")
    assert "by_step" not in found[-1]
    assert len(found[-1]["policy_sha256"]) == 64


def test_an_evaluation_is_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    view = open_view(False, True)
    view.evaluation(3, {"mean@2": 0.5, "length_mean": 9.0})
    view.end(SUMMARY, "runs/x")
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert isinstance(view, JsonLines)
    assert first == {"event": "evaluation", "step": 3, "mean@2": 0.5, "length_mean": 9.0}
    assert (last["event"], last["folder"], last["steps"]) == ("end", "runs/x", 4)
