"""Timeouts of calls, with a made-up clock: only late workers are lost."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import pytest
from pools import StandIn

from tlt.cluster.calls import Deadlines
from tlt.cluster.supervisor import Done, Supervisor

PATIENCE = 2.0  # seconds; twelve times as many for a long call that was never seen


class Clocked(StandIn):
    """Workers whose calls take the given seconds, one after the other. The process of a new worker takes `boots`
    seconds to start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, boots: float = 0.0, **takes: float) -> None:
        super().__init__()
        self.now, self.boots, self.takes = 1000.0, boots, takes
        self._ends: list[float] = []
        self._free = [0.0] * self.size
        self._begins = [0.0] * self.size
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def submit(self, index: int, method: str, *arguments: Any) -> int:
        self._free[index] = max(self.now, self._free[index]) + self.takes.get(method, 0.0)
        self._ends.append(self._free[index])
        return len(self._ends) - 1

    def wait(self, handles: Collection[int], timeout: float | None = None) -> list[int]:
        self.now += 0.25
        return [handle for handle in handles if self._ends[handle] <= self.now]

    def result(self, handle: int) -> Any:
        return "done"

    def replace(self, index: int) -> None:
        super().replace(index)
        self._free[index] = self._begins[index] = self.now + self.boots

    def has_begun(self, index: int) -> bool:
        return self.now >= self._begins[index]


def test_a_deadline_follows_the_recent_durations_of_a_call() -> None:
    deadlines = Deadlines(patience=5.0)
    assert (deadlines.seconds("decode"), deadlines.seconds("update")) == (5.0, 60.0)
    for durations, seconds in [([0.1], 5.0), ([40.0, 0.5], 400.0), ([2.0] * 5, 20.0)]:
        for duration in durations:
            deadlines.took("update", duration)
        assert deadlines.seconds("update") == seconds
    assert deadlines.seconds("save") == 60.0
    slices = ("train_drafter", "evaluate_drafter", "look_ahead")
    assert {deadlines.seconds(method) for method in slices} == {5.0}, "calls of idle work are short"


def test_the_timeout_of_a_call_is_ten_times_its_recent_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Clocked(monkeypatch)
    supervisor = Supervisor(pool, patience=PATIENCE)
    for seconds in (8.0, 60.0):
        pool.takes["save"] = seconds
        assert supervisor.call_all("save") == {0: "done", 1: "done"}
    assert pool.replaced == []


def test_the_time_of_a_call_begins_when_its_worker_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Clocked(monkeypatch, decode=1.5)
    supervisor = Supervisor(pool, patience=PATIENCE)
    supervisor.call_all("decode")
    pool.now += 3600.0
    for _ in range(4):
        supervisor.call(1, "decode")
    heard: list[Done] = []
    while supervisor.calls.of_worker(1):
        heard += supervisor.done()
    assert heard == [Done(1, "decode", "done")] * 4
    assert pool.replaced == []


def test_the_time_of_a_new_worker_begins_when_its_process_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """To send and to take the state are long calls."""
    pool = Clocked(monkeypatch, boots=600.0, state=10.0, take_state=10.0)
    supervisor = Supervisor(pool, patience=PATIENCE)
    supervisor.replace(1, "decode", "its process is gone")
    assert supervisor.call_all("sync") == {0: "done", 1: "done"}
    assert pool.replaced == [1]
    assert 600 < pool.now - 1000 < 620


def test_a_new_call_does_not_postpone_the_timeout_of_a_running_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as `take_drafter`, which is sent to workers that decode."""
    pool = Clocked(monkeypatch, decode=3600.0)
    supervisor, began = Supervisor(pool, patience=PATIENCE), pool.now
    supervisor.call(1, "decode")
    while not pool.replaced and pool.now < began + 60.0:
        supervisor.call(1, "take_drafter")
        supervisor.done(0.0)
    assert pool.replaced == [1]
    assert pool.now < began + 2 * PATIENCE
