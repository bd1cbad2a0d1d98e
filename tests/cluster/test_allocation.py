"""Fair shares, forecasts and the task of an idle worker, against hand-worked numbers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tlt.cluster.allocation import Allocation, Forecast, RoundTime, Share, half_of, take
from tlt.cluster.worker import Slice
from tlt.types import Prompt, Request, RolloutStats, Row, SamplingParams


def test_the_time_of_a_round_is_a_line_through_the_measurements() -> None:
    """0.01 s, and 0.002 s per row."""
    time = RoundTime()
    assert time(4) == 0.0
    for rows in (1, 2, 8, 3, 5):
        time.add(rows, 0.01 + 0.002 * rows)
    assert time(16) == pytest.approx(0.042)
    assert time(0) == pytest.approx(0.01)


def test_the_time_of_rounds_of_one_size_is_a_mean_that_favours_recent_rounds() -> None:
    time = RoundTime()
    for seconds in [1.0] * 200 + [0.5] * 200:
        time.add(4, seconds)
    assert time(64) == pytest.approx(0.5, abs=0.01)


def test_a_round_of_more_rows_is_never_estimated_as_shorter() -> None:
    time = RoundTime()
    time.add(1, 0.03)
    time.add(8, 0.01)
    assert time(8) == time(1) == pytest.approx(0.02, rel=0.02)


def forecast() -> Forecast:
    """Return a forecast after ten responses of 100 tokens and two of 500. A round takes 10 ms, and 10 ms per row."""
    found = Forecast(longest=1000)
    found.lengths.extend([100] * 10 + [500] * 2)
    for rows in (1, 2, 4):
        found.round_time.add(rows, 0.01 + 0.01 * rows)
    found.prefill_seconds = 1e-4
    return found


@pytest.mark.parametrize(("tokens", "left"), [(0, 2000 / 12), (99, 2000 / 12 - 99), (100, 400), (500, 500), (900, 100)])
def test_the_remaining_length_is_estimated_from_longer_responses(tokens: int, left: float) -> None:
    """Beyond the longest known response the estimate is its present length again, up to the limit."""
    assert forecast().remaining(tokens) == pytest.approx(left, abs=1)


def test_the_gain_of_help_by_hand() -> None:
    """Four rows of 100 tokens have 400 more: at 5 tokens per round, 80 rounds of 50 ms. With two rows on each worker:
    80 rounds of 30 ms, and a prefill of 200 tokens."""
    live, found = dict.fromkeys(range(4), 100), forecast()
    assert found.helping(live, [1, 3], 5.0) == pytest.approx(80 * 0.02 - 200 * 1e-4)
    assert found.helping(live, [3], 5.0) == pytest.approx(80 * 0.01 - 100 * 1e-4)
    assert found.rounds({1: 100, 2: 500}, 5.0) == pytest.approx(100), "a worker ends with its last row: 500 more tokens"


def test_half_of_the_rows_are_moved_long_and_short_ones_but_not_the_longest() -> None:
    assert half_of({1: 10, 2: 40, 3: 30, 4: 20}) == [3, 1]
    assert half_of({7: 5}) == []


def groups(*sizes: int) -> deque[list[str]]:
    return deque([f"{name}{index}" for index in range(size)] for name, size in zip("abcdef", sizes, strict=False))


def test_a_worker_takes_whole_groups_up_to_its_fair_share() -> None:
    queue = groups(4, 4, 4, 4)
    assert take(queue, load=0, fair=8, slots=64) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]
    assert take(queue, load=8, fair=8, slots=64) == []
    assert take(queue, load=7, fair=8, slots=64) == ["c0", "c1", "c2", "c3"]
    assert len(queue) == 1


def test_a_group_that_does_not_fit_is_split_if_an_eighth_of_the_slots_is_free() -> None:
    queue = groups(8)
    assert take(queue, load=14, fair=20, slots=16) == ["a0", "a1"]
    assert list(queue) == [["a2", "a3", "a4", "a5", "a6", "a7"]]
    assert take(queue, load=15, fair=20, slots=16) == []
    assert take(groups(8), load=0, fair=8, slots=4) == ["a0", "a1", "a2", "a3"]


def test_rows_assigned_to_a_lost_worker_are_given_to_others() -> None:
    """Idle workers are interrupted, so that they take them."""
    interrupted: list[bool] = []
    crew: Any = SimpleNamespace(size=2, present=[0, 1], break_off=lambda: interrupted.append(True))
    allocation = Allocation(crew, 8, Forecast(1000))
    given, promised = (Row(Request(Prompt(0, "", (1, 2)), i, 0, i, SamplingParams())) for i in range(2))
    allocation.shares[1] = Share(rows={0: given}, promised=[promised])
    allocation.reclaim(1)
    assert list(allocation.queue) == [[given, promised]]
    assert not allocation.shares[1].promised
    assert interrupted


def row(seed: int) -> Row:
    return Row(Request(Prompt(0, "", (1, 2)), seed, 0, seed, SamplingParams()))


def allocation_of(*ready: int) -> tuple[Allocation, list[str]]:
    """Return an allocation for a crew of three workers, and a list that notes when idle work is interrupted."""
    noted: list[str] = []
    break_off = partial(noted.append, "interrupted")
    crew: Any = SimpleNamespace(size=3, present=[*ready], ready={*ready}, break_off=break_off)
    return Allocation(crew, 8, Forecast(1000)), noted


def slice_of(*released: Row, live: Mapping[int, int] | None = None, rounds: int = 0) -> Slice:
    return Slice([], [*released], RolloutStats(seconds={"prefill": 0.0}, rounds=rounds), dict(live or {}), [], 1.0, {})


@pytest.mark.parametrize("is_lost", [False, True])
def test_released_rows_go_to_the_worker_that_waits_or_to_any_if_it_is_lost(is_lost: bool) -> None:
    allocation, noted = allocation_of(*([0, 2] if is_lost else [0, 1, 2]))
    rows = [row(0), row(1)]
    allocation.shares[0] = Share(rows={one.request.seed: one for one in rows}, helper=1)
    allocation.handle_slice(0, slice_of(rows[1]))
    assert list(allocation.queue) == [[rows[1]]] * is_lost
    assert allocation.shares[1].promised == [rows[1]] * (not is_lost)
    assert noted == ["interrupted"]


def test_a_worker_that_ran_out_of_rows_has_no_helper() -> None:
    allocation, _ = allocation_of(0, 1, 2)
    allocation.shares[0] = Share(asked=[1], helper=1)
    assert allocation.take_rows(0) == []
    assert (allocation.shares[0].asked, allocation.shares[0].helper) == ([], None)


def test_counters_of_lost_workers_are_of_one_rollout() -> None:
    allocation, _ = allocation_of(0, 1, 2)
    for worker in (0, 1):
        allocation.shares[worker].last = slice_of(rounds=3)
        allocation.reclaim(worker)
    assert allocation.stats()[0].rounds == 6
    allocation.begin(0)
    assert allocation.stats()[0].rounds == 0


def test_one_worker_at_a_time_waits_for_rows_of_another() -> None:
    (allocation, _), live = allocation_of(0, 1, 2), dict.fromkeys(range(4), 9)
    allocation.shares[0] = Share(rows={seed: row(seed) for seed in live}, last=slice_of(live=live))
    allocation.forecast.helping = lambda *arguments: 0.14
    assert not allocation.ask_for_rows(1), "it saves 0.14 s: not worth the trouble"
    allocation.forecast.helping = lambda *arguments: math.inf
    assert [allocation.ask_for_rows(worker) for worker in (1, 2)] == [True, False]
    allocation.handle_slice(0, slice_of(live=live))
    assert allocation.shares[0].helper == 1, "the call began before the worker was asked"
