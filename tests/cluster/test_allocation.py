"""Shares of the queue that workers take, by hand-worked numbers."""

from __future__ import annotations

from collections import deque

from tlt.cluster.allocation import take


def groups(*sizes: int) -> deque[list[str]]:
    return deque([f"{name}{index}" for index in range(size)] for name, size in zip("abcdef", sizes, strict=False))


def test_a_worker_takes_whole_groups_up_to_its_fair_share() -> None:
    queue = groups(4, 4, 4, 4)
    assert take(queue, load=0, fair=8, slots=64) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]
    assert take(queue, load=8, fair=8, slots=64) == []
    assert take(queue, load=7, fair=8, slots=64) == ["c0", "c1", "c2", "c3"]
    assert len(queue) == 1


def test_a_group_that_does_not_fit_is_split_once_an_eighth_of_the_slots_is_free() -> None:
    queue = groups(8)
    assert take(queue, load=14, fair=20, slots=16) == ["a0", "a1"]
    assert list(queue) == [["a2", "a3", "a4", "a5", "a6", "a7"]]
    assert take(queue, load=15, fair=20, slots=16) == []
    assert take(groups(8), load=0, fair=8, slots=4) == ["a0", "a1", "a2", "a3"]
