"""Advantages: pure functions from a group's rewards to one number a response."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EPSILON = 1e-6


def grpo(rewards: Sequence[float]) -> list[float]:
    """GRPO (arXiv 2402.03300): (reward - mean) / (standard deviation + 1e-6), the deviation with n - 1 as torch.std
    has it.

    [1, 0, 0, 1] -> mean 0.5, deviation 0.57735 -> [0.866, -0.866, -0.866, 0.866]. A group of equal rewards gives zeros.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)  # the mean of equal numbers may be off by a rounding, and Adam would enlarge it
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (deviation + _EPSILON) for r in rewards]
