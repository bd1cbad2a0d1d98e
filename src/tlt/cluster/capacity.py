"""Bookkeeping of workers whose process Ray has not started yet (awaited), and of workers that are left out."""

from __future__ import annotations

import logging
import time

from tlt.cluster.pool import ClusterError, Pool

log = logging.getLogger(__name__)

_LOG_AFTER = 10.0  # seconds after which a missing process is logged
_POLL_EVERY = 1.0  # seconds between two checks
_PAUSE = 30.0  # seconds before a worker that was lost too often is tried again; doubled each time
_LONGEST_PAUSE = 3600.0


class Capacity:
    """Awaited and absent workers.

    `grace` is the timeout in seconds for the start of a process. If fewer than `least` workers are left, the run ends.
    """

    def __init__(self, pool: Pool, least: int, grace: float) -> None:
        self.pool, self.least, self.grace = pool, least, grace
        self.awaited = dict.fromkeys(range(pool.size), time.monotonic())
        """awaited workers, and the time at which each was requested"""
        self._logged: set[int] = set()  # awaited workers whose delay was logged
        self._absent: dict[int, float] = {}  # workers that are left out, and the earliest time of their return
        self._next = 0.0

    @property
    def present(self) -> list[int]:
        """Workers that are not left out, awaited ones included, in order."""
        return [index for index in range(self.pool.size) if index not in self._absent]

    def awaits(self, index: int) -> None:
        """Note that a new process of this worker was requested."""
        self._absent.pop(index, None)
        self.awaited[index] = time.monotonic()

    def poll(self) -> tuple[list[int], list[int]]:
        """Return the workers whose process has started since the last check, and the workers whose process did not
        start in time."""
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
        """Continue without the worker until its process has started. If it was left out `times` times because of
        losses, also wait for a pause that doubles each time. Raises ClusterError if too few workers are left."""
        self.awaited.pop(index, None)
        self._logged.discard(index)
        pause = min(_PAUSE * 2 ** (times - 1), _LONGEST_PAUSE) if times else _POLL_EVERY
        self._absent[index] = time.monotonic() + pause
        left = f"{len(self.present)} of {self.pool.size} workers are left"
        if len(self.present) < self.least:
            raise ClusterError(f"{left}, but the run needs {self.least} (cluster.min_workers): {why}")
        again = f"; worker {index} is tried again in {pause:g} s" if times else ""
        log.warning("%s, and the run continues with them%s: %s", left, again, why)

    def back(self) -> list[int]:
        """Return the left-out workers whose pause is over and whose process has started."""
        now = time.monotonic()
        if not self._absent or now < self._next:
            return []
        self._next = now + _POLL_EVERY
        return [i for i, until in self._absent.items() if now > until and self.pool.has_begun(i)]
