"""The protocol of several workers, wherever they run: calls to them, losses, and how to replace them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

Handle = Any
"""a call under way; as an argument of another call it stands for the result, which goes from worker to worker"""


class WorkerLost(Exception):
    """The worker died, or an argument of the call was lost with another worker. The message says why, if known."""


class ClusterError(ValueError):
    """The workers cannot go on; the message says what to do."""


class Pool(Protocol):
    size: int

    def submit(self, index: int, method: str, *arguments: Any) -> Handle:
        """Call a method of worker `index`. A worker's calls run one after the other, in order of submission; workers
        run in parallel."""
        ...

    def interrupt(self, index: int, number: float) -> None:
        """Call `Worker.interrupt` at once, beside the worker's present call. If the worker is lost, nothing happens."""
        ...

    def updated(self, index: int, seconds: float) -> float | None:
        """`Worker.updated`, read in the same way; None if there is no answer within so many seconds."""
        ...

    def put(self, value: Any) -> Handle:
        """A handle of this value, to be an argument of calls to several workers."""
        ...

    def wait(self, handles: Collection[Handle], timeout: float | None = None) -> list[Handle]:
        """The calls that are done or have failed: at least one, unless the timeout in seconds is over."""
        ...

    def result(self, handle: Handle) -> Any:
        """The result of a call that is done. Raises WorkerLost, or what the method raised."""
        ...

    def replace(self, index: int) -> None:
        """Put a new worker, as at the start of the run, in the place of this one, which is killed if it still lives."""
        ...

    def has_begun(self, index: int) -> bool:
        """Whether the process of this worker has begun. If not, there may be no place for it."""
        ...

    def capacity(self) -> str:
        """A clause that says how many places for workers there are."""
        ...

    def last_words(self, index: int) -> str:
        """A clause with the last line that a worker wrote, and where; empty if it wrote none."""
        ...

    def close(self) -> None:
        """End all workers, and leave nothing behind."""
        ...
