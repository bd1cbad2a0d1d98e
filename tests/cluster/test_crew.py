"""Calls to workers of which one does not answer."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from tlt.cluster.crew import Crew, Done


class OneThatHangs:
    """Worker 0 answers at once, worker 1 never; a new one in its place does."""

    size = 2

    def __init__(self) -> None:
        self.replaced: list[int] = []
        self._calls: list[int] = []

    def submit(self, index: int, method: str, *arguments: Any) -> int:
        self._calls.append(index)
        return len(self._calls) - 1

    def wait(self, handles: Collection[int], timeout: float | None = None) -> list[int]:
        return [handle for handle in handles if self._calls[handle] not in {1} - set(self.replaced)]

    def result(self, handle: int) -> str:
        return "done"

    def replace(self, index: int) -> None:
        self.replaced.append(index)

    def come_back(self, index: int, number: float) -> None: ...

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
