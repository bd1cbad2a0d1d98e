"""Pool of one worker in this process."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

from tlt.cluster.pool import Handle, Pool


class LocalPool:
    """One worker in this process. Its calls run one after the other while the driver waits for a result. A signal
    handler that raises ends the call at once."""

    size, is_concurrent = 1, False

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._numbers = itertools.count()
        self._queue: dict[Handle, tuple[str, tuple[Any, ...]]] = {}  # calls that have not begun, in order of submission
        self._returned: dict[Handle, Any] = {}  # results, and exceptions of calls that failed

    def submit(self, index: int, method: str, *arguments: Any) -> Handle:
        handle = next(self._numbers)
        self._queue[handle] = method, arguments
        return handle

    def wait(self, handles: Collection[Handle], timeout: float | None = None) -> list[Handle]:
        while self._queue and self._returned.keys().isdisjoint(handles):
            handle = next(iter(self._queue))
            method, arguments = self._queue.pop(handle)
            try:
                self._returned[handle] = getattr(self.worker, method)(*arguments)
            except Exception as error:
                self._returned[handle] = error
        return [handle for handle in handles if handle in self._returned]

    def result(self, handle: Handle) -> Any:
        result = self._returned.pop(handle)
        if isinstance(result, Exception):
            raise result
        return result

    def interrupt(self, index: int, number: float) -> None:
        self.worker.interrupt(number)

    def updated(self, index: int, seconds: float) -> float | None:
        return self.worker.updated

    def put(self, value: Any) -> Handle:
        """Return the value itself, because arguments are not copied."""
        return value

    def replace(self, index: int) -> None:
        raise AssertionError("a worker in this process is never lost")

    def has_begun(self, index: int) -> bool:
        return True

    def capacity(self) -> str:
        return ""

    def last_log_line(self, index: int) -> str:
        return ""

    def close(self) -> None: ...


def local_worker(pool: Pool) -> Any:
    """Return the worker of a pool in this process."""
    assert isinstance(pool, LocalPool), "the workers are other processes"
    return pool.worker
