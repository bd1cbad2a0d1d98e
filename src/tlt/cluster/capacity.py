"""Bookkeeping of workers that Ray has not started yet (awaited), and of workers that are left out of the run."""

from __future__ import annotations

import logging
import time

from tlt.cluster.pool import ClusterError, Pool

log = logging.getLogger(__name__)

_LOG_AFTER = 10.0  # seconds after which a process that has not started is logged
_POLL_EVERY = 1.0  # seconds between two checks whether left-out workers can return
_PAUSE = 30.0  # seconds before a worker that was lost too often is tried again; doubled each time
_LONGEST_PAUSE = 3600.0  # maximum pause in seconds before a lost worker is tried again


class Capacity:
    """Workers whose process is awaited, and workers that are left out, because they were lost too often or did not
    start.

    `grace`: timeout in seconds for the start of a worker's process. `least`: minimum number of workers that are not
    left out. With fewer, the run ends.
    """

    def __init__(self, pool: Pool, least: int, grace: float) -> None:
        self.pool, self.least, self.grace = pool, least, grace
        self.awaited = dict.fromkeys(range(pool.size), time.monotonic())
        """time of the request (`time.monotonic`) by worker, for workers whose process has not started yet"""
        self._logged: set[int] = set()  # awaited workers whose delay was logged
        self._absent: dict[int, float] = {}  # left-out worker -> earliest time of its return
        self._next = 0.0

    @property
    def present(self) -> list[int]:
        """Workers that are not left out, ascending. Workers whose process has not started yet are included."""
        return [index for index in range(self.pool.size) if index not in self._absent]

    def awaits(self, index: int) -> None:
        """Record that a new process was requested for this worker, which is then no longer left out."""
        self._absent.pop(index, None)
        self.awaited[index] = time.monotonic()

    def poll(self) -> tuple[list[int], list[int]]:
        """Return two lists of workers: those whose process has started since the last call, and those whose process did
        not start within `grace` seconds."""
        now = time.monotonic()
        begun = [index for index in self.awaited if self.pool.has_begun(index)]
        for index in begun:
            del self.awaited[index]
            self._logged.discard(index)
        for index, since in self.awaited.items():
            if now - since > min(_LOG_AFTER, self.grace) and index not in self._logged:
                self._logged.add(index)
                late = f"worker {index} has not started after {now - since:.0f} s ({self.pool.capacity()})"
                log.warning("%s; its timeout is %g s (cluster.grace)", late, self.grace)
        return begun, [index for index, since in self.awaited.items() if now - since > self.grace]

    def leave_out(self, index: int, why: str, times: int = 0) -> None:
        """Continue the run without worker `index`, for the reason `why`. The worker may return when its process has
        started and a pause is over. `times`: number of losses in a row above the permitted number. The pause is 1 s if
        `times` is 0, and 30 s if it is 1. Each further loss doubles the pause, up to an hour. Raises ClusterError if
        too few workers are left."""
        self.awaited.pop(index, None)
        self._logged.discard(index)
        pause = min(_PAUSE * 2 ** (times - 1), _LONGEST_PAUSE) if times else _POLL_EVERY
        self._absent[index] = time.monotonic() + pause
        left = f"{len(self.present)} of {self.pool.size} workers are left"
        if len(self.present) < self.least:
            raise ClusterError(
                f"{left}, but the run needs {self.least} (cluster.min_workers, or all workers with train.shard): {why}"
            )
        again = f"; worker {index} is tried again in {pause:g} s" if times else ""
        log.warning("%s, and the run continues with them%s: %s", left, again, why)

    def back(self) -> list[int]:
        """Return the left-out workers that can take part in the run again: their process has started, and their pause
        is over. Return [] if the last check was less than a second ago."""
        now = time.monotonic()
        if not self._absent or now < self._next:
            return []
        self._next = now + _POLL_EVERY
        return [i for i, until in self._absent.items() if now > until and self.pool.has_begun(i)]
