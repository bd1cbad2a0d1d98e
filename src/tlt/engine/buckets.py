"""Rounds of about one size, and what they took. No torch here."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

_WINDOW_ROUNDS = 64  # rounds whose seconds are remembered of an arm in a bucket


class Bucket(NamedTuple):
    """Powers of two of live rows, of four of context."""

    rows: int
    context: int


def bucket_of(rows: int, context: float) -> Bucket:
    return Bucket(max(0, math.ceil(math.log2(rows))), max(0, math.ceil(math.log(max(1.0, context) / 256, 4))))


@dataclass
class Took:
    """Seconds of the last rounds of an arm; what is read every round is kept ready."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW_ROUNDS))
    median: float = 0.0

    def add(self, seconds: Iterable[float]) -> None:
        self.seconds.extend(seconds)
        self.median = statistics.median(self.seconds or (0.0,))
