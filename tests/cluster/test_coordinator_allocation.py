"""Equal parts of a rollout's rows, and the rows of lost workers."""

from __future__ import annotations

from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from tlt.cluster.coordinator import Allocation, Share
from tlt.cluster.worker import Slice
from tlt.types import Prompt, Request, RolloutStats, Row, SamplingParams


def row(seed: int) -> Row:
    return Row(Request(Prompt(seed // 10, "", (1, 2)), seed % 10, 0, seed, SamplingParams()))


def allocation_of(*present: int, slots: int = 8) -> tuple[Allocation, list[str]]:
    """Return an allocation for a supervisor with these workers, and a list that notes when idle work is interrupted."""
    noted: list[str] = []
    calls = SimpleNamespace(break_off=partial(noted.append, "interrupted"))
    supervisor: Any = SimpleNamespace(size=3, present=[*present], ready={*present}, calls=calls)
    return Allocation(supervisor, slots), noted


@pytest.mark.parametrize(
    ("groups", "slots", "dealt"),
    [
        (1, 64, [3, 3, 2]),  # one group for three workers
        (2, 64, [6, 6, 4]),
        (4, 64, [11, 11, 10]),
        (6, 12, [12, 12, 12]),  # the rest waits
    ],
)
def test_workers_begin_with_equal_parts(groups: int, slots: int, dealt: list[int]) -> None:
    """If there are fewer groups than workers, the responses of a group go to several workers."""
    allocation, _ = allocation_of(0, 1, 2, slots=slots)
    rows = [row(10 * group + index) for group in range(groups) for index in range(8)]
    allocation.begin(len(rows))
    allocation.queue.extend(rows)
    taken = [allocation.take_rows(index) for index in range(3)]
    assert [len(some) for some in taken] == dealt
    assert [*chain(*taken, allocation.queue)] == rows, "in order"


@pytest.mark.parametrize(("waiting", "ended", "taken"), [(8, 1, 0), (8, 2, 2), (1, 1, 1)])
def test_a_full_worker_takes_rows_when_an_eighth_of_its_slots_is_free(waiting: int, ended: int, taken: int) -> None:
    """It takes all rows that wait as soon as they fit."""
    allocation, _ = allocation_of(0, 1, slots=16)
    allocation.begin(2 * (16 + waiting))
    allocation.queue.extend(row(seed) for seed in range(16 + waiting))
    assert len(allocation.take_rows(0)) == 16
    for seed in range(ended):
        del allocation.shares[0].rows[seed]
    assert len(allocation.take_rows(0)) == taken


def test_rows_of_a_lost_worker_come_first() -> None:
    """Idle workers are interrupted, so that they take them."""
    allocation, noted = allocation_of(0, 1)
    rows = [row(seed) for seed in range(3)]
    allocation.queue.append(rows[2])
    allocation.shares[1] = Share(rows={0: rows[0], 1: rows[1]})
    allocation.reclaim(1)
    assert list(allocation.queue) == rows
    assert noted == ["interrupted"]


def test_counters_of_lost_workers_are_of_one_rollout() -> None:
    allocation, _ = allocation_of(0, 1, 2)
    for worker in (0, 1):
        allocation.shares[worker].last = Slice([], RolloutStats(rounds=3), {}, {})
        allocation.reclaim(worker)
    assert allocation.stats()[0].rounds == 6
    allocation.begin(0)
    assert allocation.stats()[0].rounds == 0
