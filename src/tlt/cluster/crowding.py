"""Cores that idle work takes from workers that decode. A worker measures how long its decoding thread waited for a free
core. If it waits much while others do idle work, idle work rests."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_JUDGED = 1.0  # seconds of decoding, concurrently with idle work, between two judgements
_CROWDED = 0.15  # share of these seconds that decoding waits for a free core, from which idle work rests
_REST = 20.0  # seconds of decoding for which idle work rests; so a trial that slows decoding takes 5 % of the time
_FILE = Path("/proc/thread-self/schedstat")  # Linux: nanoseconds on a core, nanoseconds of waiting for one


class CoreClock:
    """Clock of the thread that makes it: seconds since then, and seconds in which the thread waited for a free core."""

    def __init__(self) -> None:
        self._began, self._waited = time.perf_counter(), _waited()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def waited(self) -> float:
        return _waited() - self._waited


def _waited() -> float:
    """Return the seconds so far in which this thread was ready to run and waited for a core; 0 if they are unknown."""
    with suppress(OSError):
        return int(_FILE.read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0


class Crowding:
    """Judgement whether idle work takes cores from workers that decode."""

    def __init__(self) -> None:
        self._seconds = self._waited = self._rest = 0.0

    @property
    def rests(self) -> bool:
        return self._rest > 0.0

    def decoded(self, seconds: float, waited: float, is_concurrent: bool) -> None:
        """Record a decoding call: its duration, how long it waited for a free core, and whether others did idle work
        meanwhile."""
        self._rest = max(0.0, self._rest - seconds)
        if self.rests or not is_concurrent:
            return
        self._seconds, self._waited = self._seconds + seconds, self._waited + waited
        if self._seconds >= _JUDGED:
            share, self._seconds, self._waited = self._waited / self._seconds, 0.0, 0.0
            if share >= _CROWDED:
                self._rest = _REST
                log.info("decoding waits %.0f %% of its time for a core: idle workers rest for a while", 100 * share)
