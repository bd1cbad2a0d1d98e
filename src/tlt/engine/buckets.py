"""Rounds of similar size, and their durations. No torch here."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

_WINDOW_ROUNDS = 64  # number of rounds whose seconds are kept for each arm in a bucket


class Bucket(NamedTuple):
    """Exponents: active rows as a power of two, context as a power of four."""

    rows: int
    context: int


def bucket_of(rows: int, context: float) -> Bucket:
    return Bucket(max(0, math.ceil(math.log2(rows))), max(0, math.ceil(math.log(max(1.0, context) / 256, 4))))


@dataclass
class Took:
    """Seconds of an arm's last rounds. The median is stored, because it is read every round."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW_ROUNDS))
    median: float = 0.0

    def add(self, seconds: Iterable[float]) -> None:
        self.seconds.extend(seconds)
        self.median = statistics.median(self.seconds or (0.0,))
