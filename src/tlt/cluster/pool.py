"""Several workers and calls to them, wherever they are. What is done with them knows no more of them than this."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

Handle = Any
"""of a call; as an argument of another call it stands for the result, which then goes from worker to worker"""


class WorkerLost(Exception):
    """The worker died, or its answer is lost with another one's; the message says what is known of why."""


class ClusterError(ValueError):
    """The workers cannot go on; the message says what to do."""


class Pool(Protocol):
    size: int

    def submit(self, index: int, method: str, *arguments: Any) -> Handle:
        """Call a method of worker `index`; one after the other in order of submission, workers beside each other."""
        ...

    def interrupt(self, index: int, number: float) -> None:
        """`Worker.interrupt`, at once, beside whatever the worker is at; lost with a worker that is lost."""
        ...

    def updated(self, index: int, seconds: float) -> float | None:
        """`Worker.updated`, in the same way; None where there is no answer for so many seconds."""
        ...

    def put(self, value: Any) -> Handle:
        """For an argument that several workers are given."""
        ...

    def wait(self, handles: Collection[Handle], timeout: float | None = None) -> list[Handle]:
        """Those that are done, or failed: at least one, unless the time is up."""
        ...

    def result(self, handle: Handle) -> Any:
        """Of a call that is done. Raises WorkerLost, or what the method raised."""
        ...

    def replace(self, index: int) -> None:
        """A new worker in the place of one, which is killed if it still lives; as at the start of the run."""
        ...

    def has_begun(self, index: int) -> bool:
        """Whether the process of this worker runs, or has ended; else there may be no place for it."""
        ...

    def capacity(self) -> str:
        """How many places for workers there are, in a clause."""
        ...

    def last_words(self, index: int) -> str:
        """The end of what a worker has written, in a clause that says where; empty if it has not."""
        ...

    def close(self) -> None:
        """End all workers, and leave nothing behind."""
        ...
