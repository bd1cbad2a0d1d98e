"""Pools of workers: their protocol for calls, losses and replacements, and the pool of one worker in this process."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any, Protocol

from tlt.config import ConfigError
from tlt_rl import install_hint

Handle = Any
"""Handle of a worker call or of a stored value. As an argument of a call it stands for the result or value."""


class WorkerLost(Exception):
    """Error because the called worker died, or because another worker died whose result was an argument of the call.
    The message gives the reason if it is known."""


class ClusterError(ValueError):
    """Error because the workers cannot start or cannot continue. The message gives the remedy."""


def refuse_no_ray() -> None:
    """Raise ConfigError if Ray, which runs several workers, is not installed."""
    if not find_spec("ray"):
        raise ConfigError(f"cluster.workers above 1 needs Ray: {install_hint('cluster')}")


class Pool(Protocol):
    size: int
    is_concurrent: bool
    """Whether workers run while the driver does something else. If not, the only worker is in the driver's process."""

    def submit(self, index: int, method: str, *arguments: Any) -> Handle:
        """Call a method of worker `index`. The calls of a worker run one after the other, in order of submission.
        Workers run concurrently."""
        ...

    def interrupt(self, index: int, number: float) -> None:
        """Call `Worker.interrupt(number)` while the worker's current call runs. Do nothing if the worker is lost."""
        ...

    def updated(self, index: int, seconds: float) -> float | None:
        """Return `Worker.updated`, the fraction of the current update that is done. It is read while another call of
        the worker runs. Return None if the worker does not answer within `seconds`."""
        ...

    def put(self, value: Any) -> Handle:
        """Return a handle of this value, for use as an argument of calls to several workers."""
        ...

    def wait(self, handles: Collection[Handle], timeout: float | None = None) -> list[Handle]:
        """Return the calls that have returned or failed: at least one, unless `timeout` seconds pass first."""
        ...

    def result(self, handle: Handle) -> Any:
        """Return the result of a finished call. Raises WorkerLost, or the exception of the method."""
        ...

    def replace(self, index: int) -> None:
        """Kill worker `index` if it still runs, and start a new one in its place. Until the new worker takes the state
        of another one, it has the recipe's model, also in a resumed run."""
        ...

    def has_begun(self, index: int) -> bool:
        """Return whether the process of this worker has started. If not, there may be no room for it."""
        ...

    def capacity(self) -> str:
        """Return a clause for error messages: the room that the workers need, and the room in the cluster."""
        ...

    def last_log_line(self, index: int) -> str:
        """Return a clause with the last line of the worker's log and its path; empty if there is none."""
        ...

    def close(self) -> None:
        """End all workers and remove everything that was started for them."""
        ...


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
