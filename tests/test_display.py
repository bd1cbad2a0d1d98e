"""The live view: what the workers are at, at any width, and while another thread changes it."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console
from rich.text import Text
from tiny import tiny_config

from tlt import run
from tlt import workers_view as workers_view_module
from tlt.display import Display
from tlt.loop import StepResult
from tlt.metrics import read_metrics
from tlt.trace import AHEAD, IDLE, ROLLOUT, STATES
from tlt.types import StepMetrics, WorkerNow
from tlt.workers_view import WorkersView, stacked

NOW = [WorkerNow(ROLLOUT, (7, 459)), WorkerNow(AHEAD, (12, 30, 5), (1, 3)), WorkerNow(IDLE)]


def shown(what: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(what)
    return console.export_text()


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Any:
    clock = Clock()
    with patch.object(workers_view_module, "time", clock):
        yield clock


def looked(clock: Clock, seconds: float, rows: int = 4) -> WorkersView:
    view = WorkersView()
    view.phase()
    for _ in range(round(seconds / 0.25)):
        clock.now += 0.25
        view.look([WorkerNow(ROLLOUT, (1,) * rows), WorkerNow(IDLE)])
    return view


def test_each_worker_has_a_line_with_its_state_rows_and_longest(clock: Clock) -> None:
    view = WorkersView()
    view.look(NOW)
    _, first, second, third = shown(view.table(NOW, step=9, width=40)).splitlines()
    assert first.split() == ["0", ROLLOUT, "2", "459", "█"]
    assert second.split() == ["1", AHEAD, "3", "30", "█", "11,", "13"]
    assert third.split() == ["2", IDLE, "▁"]


def test_a_long_rollout_fits_the_strip_as_its_cells_stand_for_longer(clock: Clock) -> None:
    short, long = looked(clock, 5), looked(clock, 100)
    assert short.seconds == 0.25
    assert long.seconds == 4.0
    for view in (short, long):
        first = shown(view.table([WorkerNow(ROLLOUT), WorkerNow(IDLE)], 0, 40)).splitlines()[1]
        assert 10 < first.count("█") <= 40


def test_a_stacked_bar_has_the_shares_and_their_legend() -> None:
    bar = stacked("workers", {ROLLOUT: 3.0, IDLE: 1.0, AHEAD: 0.0}, dict.fromkeys(STATES, "red"), width=40)
    assert isinstance(bar, Text)
    assert bar.plain.replace("\N{NO-BREAK SPACE}", " ") == "workers " + "━" * 40 + "  rollout 75%  idle 25%"


class Watched(Display):
    """Draws itself all the time, from another thread, as a terminal's refresh does."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO(), width=80))
        self.pictures: list[str] = []
        self.faults: list[BaseException] = []
        self.over = threading.Event()

    def draw(self) -> None:
        while not self.over.is_set():
            try:
                if hasattr(self, "workers_now"):
                    self.pictures.append(shown(self, 80))
            except BaseException as error:
                self.faults.append(error)
                raise

    def step(self, result: StepResult) -> None:
        self.last: StepMetrics = result.metrics
        super().step(result)


def test_a_run_is_drawn_from_another_thread_while_it_goes_on(tmp_path: Path) -> None:
    display = Watched()
    thread = threading.Thread(target=display.draw)
    thread.start()
    try:
        run.train(tiny_config(tmp_path), False, display)
    finally:
        display.over.set()
        thread.join()
    assert not display.faults
    assert any(ROLLOUT in picture for picture in display.pictures)
    last = shown(display, 80)
    assert all(len(line) <= 80 for line in last.splitlines())
    assert "mismatch" in last
    assert "workers" in last
    assert len(read_metrics(tmp_path / "run")) == 2


def test_the_line_of_a_step_says_what_was_seen_ahead(tmp_path: Path) -> None:
    display = Watched()
    run.train(tiny_config(tmp_path), False, display)
    display.last.rollout["seen_ahead"] = display.last.tokens // 2
    assert "seen ahead 50%" in display._line(display.last) or "seen ahead 49%" in display._line(display.last)
