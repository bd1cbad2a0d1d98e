"""Workers that are awaited, as Ray has not begun their process yet, and those that the run goes on without."""

from __future__ import annotations

import logging
import time

from tlt.cluster.pool import ClusterError, Pool

log = logging.getLogger(__name__)

_TELLS = 10.0  # seconds: a process that takes longer to begin is told of
_LOOKS = 1.0  # seconds between two looks
_PAUSE = 30.0  # seconds before one that was lost too often is tried again; twice as many each time, up to the longest
_LONGEST_PAUSE = 3600.0


class Capacity:
    def __init__(self, pool: Pool, least: int, grace: float) -> None:
        """A process has `grace` seconds to begin; where fewer than `least` workers are left, the run ends."""
        self.pool, self.least, self.grace = pool, least, grace
        self.awaited = dict.fromkeys(range(pool.size), time.monotonic())
        """since when"""
        self._told: set[int] = set()
        self._absent: dict[int, float] = {}  # until when at least
        self._next = 0.0

    @property
    def present(self) -> list[int]:
        """All others, in order: those that are there, or awaited."""
        return [index for index in range(self.pool.size) if index not in self._absent]

    def awaits(self, index: int) -> None:
        """A new process was asked for."""
        self._absent.pop(index, None)
        self.awaited[index] = time.monotonic()

    def look(self) -> tuple[list[int], list[int]]:
        """Those whose process has begun since the last look, and those that were awaited in vain."""
        now = time.monotonic()
        begun = [index for index in self.awaited if self.pool.has_begun(index)]
        for index in begun:
            del self.awaited[index]
            self._told.discard(index)
        for index, since in self.awaited.items():
            if now - since > min(_TELLS, self.grace) and index not in self._told:
                self._told.add(index)
                late = f"no process of worker {index} has begun for {now - since:.0f} s ({self.pool.capacity()})"
                log.warning("%s: it has %g s in all (cluster.grace)", late, self.grace)
        return begun, [index for index, since in self.awaited.items() if now - since > self.grace]

    def leave_out(self, index: int, why: str, times: int = 0) -> None:
        """The run goes on without it until there is room for it; or for a while, as it does so for so many `times`
        now. Raises ClusterError where too few are left."""
        self.awaited.pop(index, None)
        self._told.discard(index)
        pause = min(_PAUSE * 2 ** (times - 1), _LONGEST_PAUSE) if times else _LOOKS
        self._absent[index] = time.monotonic() + pause
        left = f"{len(self.present)} of {self.pool.size} workers are left"
        if len(self.present) < self.least:
            raise ClusterError(f"{left}, and a run needs {self.least} (cluster.min_workers): {why}")
        again = f", and tries worker {index} again in {pause:g} s" if times else ""
        log.warning("%s, and the run goes on with them%s: %s", left, again, why)

    def back(self) -> list[int]:
        """Those that were left out, whose time has come and whose process is there."""
        now = time.monotonic()
        if not self._absent or now < self._next:
            return []
        self._next = now + _LOOKS
        return [i for i, until in self._absent.items() if now > until and self.pool.has_begun(i)]
