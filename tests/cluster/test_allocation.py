"""Shares of the queue that workers take, by hand-worked numbers."""

from __future__ import annotations

from collections import deque

from tlt.cluster.allocation import take


def groups(*sizes: int) -> deque[list[str]]:
    return deque([f"{name}{index}" for index in range(size)] for name, size in zip("abcdef", sizes, strict=False))


def test_a_worker_takes_its_fair_share_and_splits_the_last_group() -> None:
    queue = groups(4, 4, 4)
    assert take(queue, load=0, fair=6, slots=64) == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert take(queue, load=6, fair=6, slots=64) == []
    assert take(queue, load=0, fair=6, slots=64) == ["b2", "b3", "c0", "c1", "c2", "c3"]
    assert not queue


def test_one_group_is_shared_by_all_workers() -> None:
    queue = groups(16)
    assert [len(take(queue, load=0, fair=4, slots=64)) for _ in range(4)] == [4, 4, 4, 4]
    assert not queue


def test_a_worker_takes_no_more_than_its_free_slots_once_an_eighth_is_free() -> None:
    queue = groups(8)
    assert take(queue, load=14, fair=20, slots=16) == ["a0", "a1"]
    assert list(queue) == [["a2", "a3", "a4", "a5", "a6", "a7"]]
    assert take(queue, load=15, fair=20, slots=16) == []
    assert take(groups(8), load=0, fair=8, slots=4) == ["a0", "a1", "a2", "a3"]
