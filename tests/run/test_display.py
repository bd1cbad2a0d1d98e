"""The live view: states of the workers, at any terminal width, while another thread changes them."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console
from rich.live import Live
from tiny import tiny_config

from tlt.commands import draft
from tlt.gain import gain_of
from tlt.loop import StepResult
from tlt.metrics import read_metrics
from tlt.run import display as display_module
from tlt.run import train as run
from tlt.run.display import Display, closing
from tlt.trace import AHEAD, IDLE, ROLLOUT
from tlt.types import StepMetrics, WorkerNow

NOW = [WorkerNow(ROLLOUT, (7, 459)), WorkerNow(AHEAD, (12, 30, 5), (1, 3)), WorkerNow(IDLE)]


def shown(what: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(what)
    return console.export_text()


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_each_worker_has_a_line_with_its_state_rows_and_longest() -> None:
    display = Display(Console(file=io.StringIO()))
    display.workers_now = lambda: NOW
    _, first, second, third = shown(display._workers(step=9)).splitlines()
    assert first.split() == ["0", ROLLOUT, "2", "459"]
    assert second.split() == ["1", AHEAD, "3", "30", "11,", "13"]
    assert third.split() == ["2", IDLE]


class Watched(Display):
    """Display that another thread draws all the time, as the refresh of a terminal does."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO(), width=80))
        self.over = threading.Event()

    def draw(self) -> list[str]:
        pictures = []
        while not self.over.wait(0.005):
            if hasattr(self, "workers_now"):
                pictures.append(shown(self, 80))
        return pictures


def test_a_run_can_be_drawn_from_another_thread(tmp_path: Path) -> None:
    display = Watched()
    with ThreadPoolExecutor() as pool:
        pictures = pool.submit(display.draw)
        try:
            run.train(tiny_config(tmp_path), False, display)
        finally:
            display.over.set()
    assert any(ROLLOUT in picture for picture in pictures.result())
    assert all(word in shown(display, 80) for word in ("mismatch", "longest"))
    assert len(read_metrics(tmp_path / "run")) == 2
    with patch.object(display, "_live", Live()):
        display.stopping("SIGTERM: wait")
    assert "SIGTERM: wait" in shown(display)


def test_seconds_left_fall_while_a_step_runs_and_never_below_the_other_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(display_module, "time", clock)
    display = Display(Console(file=io.StringIO()))
    with display.live(tiny_config(tmp_path, train={"steps": 5}), 0, list):
        assert display._time_left() == ""
        display.step(StepResult([], [], step_metrics(1, seconds_left=40.0)))
        shown_left = []
        for clock.now in range(1000, 1025):
            shown_left.append(display._time_left())
    assert shown_left[:3] == ["0:00:40 left", "0:00:39 left", "0:00:38 left"]
    assert shown_left == sorted(shown_left, reverse=True)
    assert shown_left[-1] == "0:00:30 left", "a step that takes longer takes nothing off the others"
    assert "so far, 0:00:30 left" in str(display._work), "the lines of progress have the same forecast"


def step_metrics(step: int, **changes: Any) -> StepMetrics:
    """Return metrics of a step with made-up numbers, as wide as they can be."""
    rollout = {
        "spot": {"version": 12.0, "accept_length": 3.1, "rests": 0.0},
        **{"alarms": {"eagle": 0.2}, "seen_ahead": 123_456},
    }
    lengths = {"mean": 9000.0, "median": 12_345, "p99": 32_768, "max": 32_768, "truncated": 0.125}
    known: dict[str, Any] = {
        **{"reward": -0.123, "reward_std": 0.5, "rewards": {}, "tasks": {}, "lengths": lengths},
        **{"accept_length": 12.34, "responses": 128, "tokens": 234_567, "tokens_per_second": 123_456.7},
        "seconds": {"total": 1234.5, "rollout": 1000.0, "update": 234.5},
        "update": {"mismatch_mean": 1.2e-07},
        "rollout": rollout,
    }
    return StepMetrics(step=step, **known | changes)


def test_the_line_of_a_step_names_a_trained_drafter_and_look_ahead_if_it_gave_tokens(tmp_path: Path) -> None:
    display, metrics = Display(Console(file=io.StringIO())), step_metrics(3)
    with display.live(tiny_config(tmp_path), 0, lambda: NOW):
        for version, said in ((0.0, ""), (12.0, "drafter 12  ")):
            metrics.rollout["spot"]["version"] = version
            assert f"  {said}1234.5 s (" in display._line(metrics)
        for share, said in ((0.0, 0), (0.004, 0), (0.25, 1)):
            metrics.rollout["seen_ahead"] = share * metrics.tokens
            assert display._line(metrics).count("25% of tokens from look-ahead") == said
            assert display._line(metrics).count("look-ahead") == said


LENGTHS = {"length_mean": 9999.0, "truncated": 0.25, "without_reward": 3}


@pytest.mark.parametrize("width", [80, 120])
def test_everything_fits_the_terminal(width: int, tmp_path: Path) -> None:
    display = Display(Console(file=io.StringIO(), width=width, height=45))
    with display.live(tiny_config(tmp_path), 0, lambda: NOW):
        for step in range(996, 1003):
            display.step(StepResult([], [], step_metrics(step, seconds_left=98765.0)))
        display.evaluation(1000, {"mean@16": 0.123, "half_width": 0.01, "pass@1": 0.1, "pass@16": 0.5} | LENGTHS)
        picture = shown(display, width)
    lines = picture.splitlines()
    assert all(len(line) == width for line in lines)
    assert len(lines) <= 45
    numbers = ("1234.5", "1.2e-07", "123,457", "32768", "12%", "12.34", "fell to 20%")
    assert [number for number in numbers if number not in picture] == []


def test_the_line_of_the_drafter_fits_80_columns_with_its_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {
        "strategy": "eagle d6 p0",
        "accept_length": 3.21,
        "interval": 0.04,
        "times_plain": 1.87,
        "acceptance_rate": [0.9, 0.8, 0.7, 0.6, 0.5, None],
        "tokens": 1_234_567,
    }
    console = Console(file=io.StringIO(), width=80, record=True)
    monkeypatch.setattr(draft, "console", lambda: console)
    draft._print(result)
    text = console.export_text()
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    row = next(line for line in text.splitlines() if line.startswith("eagle"))
    assert " ".join(row.split()) == "eagle d6 p0 3.21 ±0.04 1.87 0.90 0.80 0.70 0.60 0.50 -"
    assert "times plain: tokens per second divided by those of plain decoding" in " ".join(text.split())


# -- the last lines ----------------------------------------------------------------------------------------------------


SUMMARY: dict[str, Any] = {
    "steps": 4,
    "reward_steps": 1,
    "reward_first": 0.1,
    "reward_last": 0.9,
    "seconds": {"total": 10.0, "rollout": 9.0},
    "tokens_per_second": 100.0,
    "accept_length": 2.0,
    "useful_share": 0.85,
    "gain": None,
    "compared": {},
    "responses": 3840,
    "without_reward": {},
    "exact": False,
    "exactness": "not exact: attention",
}


def gain(*times: float, passes: int = 10, accepted: int = 20) -> dict[str, Any]:
    """Return the gain of a run in which plain decoding took these times as long."""
    rollout = {"draft_passes": passes, "accepted": accepted}
    lines = [{"step": 2, "seconds": {"compare": each, "rollout": 1.0}, "rollout": rollout} for each in times]
    found = gain_of(lines)
    assert found
    return found._asdict()


def test_the_last_lines_show_failures_in_red_and_the_speed() -> None:
    lines = closing(SUMMARY, "runs/x")
    assert lines[0].plain.endswith(", 85% of the workers' time useful")
    assert len(lines) == 2
    assert "runs/x" in lines[-1].plain
    assert "4 steps: mean reward 0.100 in the first step, 0.900 in the last;" in lines[0].plain
    longer = closing(SUMMARY | {"steps": 30, "reward_steps": 3}, "")[0].plain
    assert "30 steps: mean reward 0.100 in the first 3 steps, 0.900 in the last 3;" in longer
    compared = {"steps": 1, "tokens": 90, "responses": 8, "differ": 0, "plain_seconds": 6.0, "rollout_seconds": 2.0}
    faster = gain(1.9, 2.0, 2.2)
    both = closing(SUMMARY | {"compared": compared, "gain": faster}, "runs/x")
    measured = "rollouts were 2.00 times as fast as plain decoding (median; 1.90 to 2.20 times in 3 steps); "
    assert both[1].plain == measured + "same tokens"
    differ = closing(SUMMARY | {"compared": compared | {"differ": 3}, "gain": faster}, "runs/x")
    assert differ[1].plain == measured + "3 of 8 responses differ"
    assert differ[2].plain == "not exact: attention. The two times are of different responses"
    bug = closing(SUMMARY | {"exact": True, "compared": compared | {"differ": 3}, "gain": faster}, "runs/x")
    assert "so this is a bug in tlt" in bug[2].plain
    one = closing(SUMMARY | {"steps": 1, "responses": 1, "without_reward": {"error": 1}}, "runs/x")
    assert one[0].plain.startswith("1 step: mean reward")
    assert one[1].plain.startswith("100.0% of 1 response had no reward")
    failures = {"without_reward": {"timeout": 10, "error": 2}}
    failed = closing(SUMMARY | failures, "runs/x")
    assert failed[1].plain == "0.3% of 3,840 responses had no reward (10 timeout, 2 error): see the errors above"
    assert "red" in str(failed[1].style)


@pytest.mark.parametrize(
    ("times", "passes", "accepted", "advised"),
    [
        ((0.9, 0.95, 0.99), 10, 20, True),
        ((1.01, 1.04, 1.05), 10, 20, True),
        ((1.06, 1.07, 1.08), 10, 20, False),
        ((0.9, 1.0, 1.1), 10, 20, True),
        ((0.9, 0.95, 0.99), 10, 0, True),  # all draft tokens were rejected
        ((0.9, 1.0, 1.1), 0, 0, False),
        ((0.9,), 10, 20, False),
    ],
)
def test_a_run_whose_drafts_gained_little_gets_advice(
    times: tuple[float, ...], passes: int, accepted: int, advised: bool
) -> None:
    """Without drafts or with a single pair the advice would have no ground."""
    found = gain(*times, passes=passes, accepted=accepted)
    lines = closing(SUMMARY | {"gain": found, "compared": {"differ": 0}}, "runs/x")
    assert any("tlt draft train" in line.plain for line in lines) == advised
