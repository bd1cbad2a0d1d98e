"""Schedules: the division of an update into mini-batches, and the learning rate of a step."""

from __future__ import annotations

import math
from itertools import pairwise

from tlt.config import TrainConfig


def split(count: int, parts: int) -> list[range]:
    """Split the indices of `count` responses evenly into at most `parts` mini-batches. Empty ones are left out."""
    borders = [round(count * k / parts) for k in range(parts + 1)]
    return [range(lo, hi) for lo, hi in pairwise(borders) if hi > lo]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step. Steps count from 0.

    It rises linearly over `warmup_steps`, then follows `train.schedule`, and is above 0 at the last step."""
    if step < config.warmup_steps or config.schedule == "constant":
        return config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))
    gone = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    return config.learning_rate * (1 - gone if config.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2)
