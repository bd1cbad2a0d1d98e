"""Calls to workers of which one does not answer."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import pytest

from tlt.cluster.crew import Crew, Done
from tlt.cluster.deadlines import Deadlines
from tlt.cluster.pool import WorkerLost
from tlt.rl.parallel import Broken


class OneThatHangs:
    """Worker 0 answers at once, unless it waits for worker 1 in an update, and worker 1 never; a new one in its place
    does."""

    size = 2

    def __init__(self) -> None:
        self.replaced: list[int] = []
        self._methods: list[str] = []
        self._calls: list[int] = []

    def submit(self, index: int, method: str, *arguments: Any) -> int:
        self._calls.append(index)
        self._methods.append(method)
        return len(self._calls) - 1

    def wait(self, handles: Collection[int], timeout: float | None = None) -> list[int]:
        done = [handle for handle in handles if self._is_done(handle)]
        if not done:
            time.sleep(min(timeout or 0.0, 0.01))
        return done

    def _is_done(self, handle: int) -> bool:
        there = 1 in self.replaced
        return there or (self._calls[handle] == 0 and self._methods[handle] != "update")

    def result(self, handle: int) -> Any:
        return Broken("connection closed") if self._methods[handle] == "update" else "done"

    def replace(self, index: int) -> None:
        self.replaced.append(index)

    def interrupt(self, index: int, number: float) -> None: ...

    def updated(self, index: int, seconds: float) -> float | None:
        return None if index == 1 and 1 not in self.replaced else 0.0

    def last_words(self, index: int) -> str:
        return f"worker_{index}.log ends with: the disk is gone"

    def put(self, value: Any) -> Any:
        return value

    def close(self) -> None: ...


def test_one_that_hangs_is_noticed_while_another_keeps_answering() -> None:
    pool = OneThatHangs()
    crew = Crew(pool, patience=0.1)
    crew.call(1, "decode")
    heard: list[Done] = []
    until = time.monotonic() + 30
    while not pool.replaced and time.monotonic() < until:
        if not crew.pending(0):
            crew.call(0, "decode")
        heard += crew.done()
    assert pool.replaced == [1]
    assert Done(1, "decode", None, lost=True) in heard


@pytest.mark.parametrize("method", ["save", "sha256", "decode", "rendezvous"])
def test_every_call_has_a_deadline(method: str) -> None:
    """A long one that was never seen to end has twelve times the patience."""
    pool = OneThatHangs()
    crew = Crew(pool, patience=0.02)
    assert crew.everyone(method) == ["done", "done"]
    assert pool.replaced == [1]
    assert crew.trouble.startswith(f"worker 1 was lost amid {method} (no answer for 0 s; worker_1.log ends with: the")


def test_of_a_joint_call_that_hangs_the_silent_worker_is_replaced() -> None:
    """All are late, as they wait for one."""
    pool = OneThatHangs()
    crew = Crew(pool, patience=0.02)
    assert crew.together("update", [(), ()]) is None
    assert pool.replaced == [1]
    assert crew.trouble == "connection closed"


def test_where_all_that_are_late_answer_one_of_them_is_replaced() -> None:
    """Nobody can tell which it is: their network, perhaps."""

    class AllThere(OneThatHangs):
        def updated(self, index: int, seconds: float) -> float | None:
            return 0.5

    pool = AllThere()
    assert Crew(pool, patience=0.02).together("update", [(), ()]) is None
    assert pool.replaced == [1]


def test_who_waits_for_the_state_of_one_that_hangs_is_not_to_blame() -> None:
    class OneAndHalfOfAnother(OneThatHangs):
        """Worker 1 is lost at once; worker 0, whose state is asked for, answers no more until it is replaced."""

        size = 3

        def _is_done(self, handle: int) -> bool:
            index, method = self._calls[handle], self._methods[handle]
            waits = method == "state" or (method == "take_state" and self.replaced == [1])
            return 0 in self.replaced or not (index == 0 or waits)

        def result(self, handle: int) -> Any:
            if self._methods[handle] == "die":
                raise WorkerLost("its process is gone")
            return super().result(handle)

    pool = OneAndHalfOfAnother()
    crew = Crew(pool, patience=0.02)
    crew.call(1, "die")
    crew.done()
    assert pool.replaced == [1]
    crew.all_sound()
    assert pool.replaced == [1, 0]


def test_a_deadline_follows_what_a_call_lately_took() -> None:
    deadlines = Deadlines(patience=5.0)
    assert (deadlines.seconds("decode"), deadlines.seconds("update")) == (5.0, 60.0)
    deadlines.took("update", 0.1)
    assert deadlines.seconds("update") == 5.0
    deadlines.took("update", 40.0)
    deadlines.took("update", 0.5)
    assert deadlines.seconds("update") == 400.0
    for _ in range(5):
        deadlines.took("update", 2.0)
    assert deadlines.seconds("update") == 20.0
    assert deadlines.seconds("save") == 60.0
