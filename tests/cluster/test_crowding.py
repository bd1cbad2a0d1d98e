"""Idle work rests while it takes cores from workers that decode."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pools import TestPool
from tiny import tiny_config

from tlt.cluster import worker
from tlt.cluster.coordinator import Coordinator
from tlt.cluster.idle import Crowding, IdleWork
from tlt.cluster.supervisor import Done, Supervisor
from tlt.cluster.worker import CoreClock, Slice
from tlt.types import RolloutStats

SLICE = 0.2  # seconds


def judged(share: float, seconds: float, others_work: bool = True) -> Crowding:
    """Return the judgement after decoding for `seconds`, of which `share` was spent waiting for a core."""
    found = Crowding()
    for _ in range(round(seconds / SLICE)):
        found.decoded(SLICE, share * SLICE, others_work)
    return found


@pytest.mark.parametrize(
    ("share", "seconds", "others_work", "rests"),
    [
        (0.33, 1.0, True, True),  # one other process on two cores
        (0.33, 0.8, True, False),  # too short for a judgement
        (0.03, 60.0, True, False),  # enough cores, although the driver needs one now and then
        (0.5, 60.0, False, False),  # the workers wait, but not because of idle work
    ],
)
def test_idle_work_rests_if_decoding_waits_for_cores(
    share: float, seconds: float, others_work: bool, rests: bool
) -> None:
    assert judged(share, seconds, others_work).rests == rests


def test_idle_work_is_tried_again_for_a_twentieth_of_the_time() -> None:
    found, rested = Crowding(), 0
    for _ in range(2100):
        rested += found.rests
        found.decoded(SLICE, 0.4 * SLICE, not found.rests)
    assert rested == 2000


def test_one_slow_slice_is_no_judgement_on_the_next_second() -> None:
    found = judged(0.14, 1.0)
    for _ in range(4):
        found.decoded(SLICE, SLICE, True)
    assert not found.rests
    found.decoded(SLICE, SLICE, True)
    assert found.rests


def idle_work(folder: Path, **cluster: Any) -> tuple[IdleWork, list[str]]:
    """Return the idle work of two workers, and the kinds that it has started. Worker 1 looks ahead."""
    config = tiny_config(folder, cluster={"workers": 2, **cluster})
    idle, started = Coordinator(Supervisor(TestPool(2, lambda index: None)), config).idle, list[str]()

    def start(name: str, possible: bool, *arguments: Any) -> bool:
        started.append(name)
        return possible

    for name in ("train", "decode_ahead"):
        setattr(idle, name, partial(start, name, name == "decode_ahead"))
    idle.supervisor.call(1, "look_ahead")
    return idle, started


def decode(idle: IdleWork, waited: float) -> None:
    for _ in range(10):
        idle.handle(Done(0, "decode", Slice([], RolloutStats(), {}, {}, seconds=SLICE, waited=waited)))


def test_idle_work_rests_while_it_takes_cores(tmp_path: Path) -> None:
    idle, started = idle_work(tmp_path)
    decode(idle, waited=0.0)
    idle.start(1)
    assert started == ["train", "decode_ahead"]
    started.clear()
    decode(idle, waited=0.3 * SLICE)
    idle.start(1)
    assert started == []


def test_workers_on_other_machines_take_no_cores(tmp_path: Path) -> None:
    idle, started = idle_work(tmp_path, address="10.0.0.1:6379")
    decode(idle, waited=0.3 * SLICE)
    idle.start(1)
    assert "decode_ahead" in started


def test_the_clock_reads_the_wait_of_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "schedstat"
    monkeypatch.setattr(worker, "_FILE", file)
    file.write_text("5 1000000000 9\n")
    clock = CoreClock()
    file.write_text("6 3500000000 9\n")
    time.sleep(0.01)
    assert clock.waited == 2.5
    assert 0.01 <= clock.seconds < 10.0


def test_a_system_that_does_not_count_waits_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_FILE", tmp_path / "none")
    assert CoreClock().waited == 0.0
