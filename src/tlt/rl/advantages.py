"""Advantages: pure functions from rewards to one number a response, by the name that `train.advantage` gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

EPSILON = 1e-6
"""added to a standard deviation that divides, as verl does; TRL adds 1e-4"""

Rewards = Sequence[Sequence[float]]
"""[group][response]; every group has at least two"""
Advantage = Callable[[Rewards, float], list[list[float]]]
"""from rewards, and what is added to a deviation that divides"""


def grpo(rewards: Sequence[float], epsilon: float = EPSILON) -> list[float]:
    """GRPO (arXiv 2402.03300): (reward - mean) / (standard deviation + epsilon), the deviation with n - 1 as torch.std
    has it.

    [1, 0, 0, 1] -> mean 0.5, deviation 0.57735 -> [0.866, -0.866, -0.866, 0.866]. A group of equal rewards gives zeros.
    """
    deviation = _deviation(rewards)
    return [_ratio(a, deviation + epsilon) for a in dr_grpo(rewards)]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Dr. GRPO (arXiv 2503.20783): reward - mean, so that a group's weight does not grow as its spread shrinks.

    [1, 0, 0, 1] -> [0.5, -0.5, -0.5, 0.5]. Its other half, a length that divides nothing, is `train.loss = 'dr_grpo'`.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)  # the mean of equal numbers may be off by a rounding, and Adam would enlarge it
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """RLOO (arXiv 2402.14740): reward - mean of the others, which is n / (n - 1) (reward - mean).

    [1, 0, 0, 1] -> 1 - 1/3, 0 - 2/3 -> [2/3, -2/3, -2/3, 2/3].
    """
    return [a * len(rewards) / (len(rewards) - 1) for a in dr_grpo(rewards)]


def grpo_batch(rewards: Rewards, epsilon: float = EPSILON) -> list[list[float]]:
    """Lite PPO (arXiv 2508.08221): the mean of the group, the standard deviation of the whole rollout, with n - 1.

    [[1, 0], [0, 0]] -> means 0.5 and 0, deviation 0.5 -> [[1, -1], [0, 0]]: a group with little spread counts little.
    """
    if not rewards:
        return []
    deviation = _deviation([r for group in rewards for r in group])
    return [[_ratio(a, deviation + epsilon) for a in dr_grpo(group)] for group in rewards]


def reinforce_pp(rewards: Rewards, epsilon: float = EPSILON) -> list[list[float]]:
    """REINFORCE++ (arXiv 2501.03262): (reward - mean) / (standard deviation + epsilon) over the whole rollout, n - 1.

    Each response counts once, whatever its length. [[1, 0], [0, 0]] -> mean 0.25, deviation 0.5 -> [[1.5, -0.5],
    [-0.5, -0.5]]: a group of equal rewards teaches as well.
    """
    flat = iter(grpo([r for group in rewards for r in group], epsilon) if rewards else [])
    return [[next(flat) for _ in group] for group in rewards]


def _deviation(rewards: Sequence[float]) -> float:
    return math.hypot(*dr_grpo(rewards)) / math.sqrt(len(rewards) - 1)  # a square may be too small or too large


def _ratio(advantage: float, deviation: float) -> float:
    """Divide, with 0 where the deviation is 0, as that of equal rewards is."""
    return advantage / deviation if deviation else 0.0


ADVANTAGES: dict[str, Advantage] = {
    "grpo": lambda rewards, epsilon: [grpo(group, epsilon) for group in rewards],
    "grpo_batch": grpo_batch,
    "dr_grpo": lambda rewards, _: [dr_grpo(group) for group in rewards],
    "rloo": lambda rewards, _: [rloo(group) for group in rewards],
    "reinforce_pp": reinforce_pp,
}
