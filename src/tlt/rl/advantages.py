"""Advantage estimators: pure functions that turn rewards into one advantage per response. `train.advantage` selects
one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

EPSILON = 1e-6
"""Number added to the standard deviation in the denominator of an advantage. verl adds the same, TRL adds 1e-4."""

Rewards = Sequence[Sequence[float]]
"""Rewards as [group][response]. Every group has at least two responses."""
Advantage = Callable[[Rewards, float], list[list[float]]]
"""Advantage estimator: a function of the rewards and of epsilon that returns advantages as [group][response]."""


def grpo(rewards: Sequence[float], epsilon: float = EPSILON) -> list[float]:
    """Return GRPO advantages (arXiv 2402.03300) of one group: (reward - mean) / (standard deviation + epsilon).

    The standard deviation divides by n - 1, like torch.std. [1, 0, 0, 1] -> mean 0.5, deviation 0.57735 ->
    [0.866, -0.866, -0.866, 0.866]. A group of equal rewards gives zeros.
    """
    deviation = _deviation(rewards)
    return [_ratio(a, deviation + epsilon) for a in dr_grpo(rewards)]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Return Dr. GRPO advantages (arXiv 2503.20783) of one group: reward - mean. There is no division by the deviation.

    [1, 0, 0, 1] -> [0.5, -0.5, -0.5, 0.5]. The other half of Dr. GRPO, a loss that is not divided by the response
    length, is `train.loss = 'dr_grpo'`.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)  # the mean of equal numbers may have a rounding error, which Adam would amplify
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Return RLOO advantages (arXiv 2402.14740) of one group: each reward minus the mean of the other n - 1 rewards.

    This equals n / (n - 1) * (reward - mean). [1, 0, 0, 1] -> 1 - 1/3, 0 - 2/3 -> [2/3, -2/3, -2/3, 2/3].
    """
    return [a * len(rewards) / (len(rewards) - 1) for a in dr_grpo(rewards)]


def grpo_batch(rewards: Rewards, epsilon: float = EPSILON) -> list[list[float]]:
    """Return Lite PPO advantages (arXiv 2508.08221): (reward - group mean) / (standard deviation + epsilon).

    The standard deviation is that of all rewards of the rollout, and divides by n - 1. A group with little spread
    therefore gets small advantages. [[1, 0], [0, 0]] -> means 0.5 and 0, deviation 0.5 -> [[1, -1], [0, 0]].
    """
    if not rewards:
        return []
    deviation = _deviation([r for group in rewards for r in group])
    return [[_ratio(a, deviation + epsilon) for a in dr_grpo(group)] for group in rewards]


def reinforce_pp(rewards: Rewards, epsilon: float = EPSILON) -> list[list[float]]:
    """Return REINFORCE++ advantages (arXiv 2501.03262): (reward - mean) / (standard deviation + epsilon).

    Mean and standard deviation are those of all rewards of the rollout. The standard deviation divides by n - 1. Each
    response counts once, whatever its length. A group of equal rewards can have advantages other than 0. [[1, 0],
    [0, 0]] -> mean 0.25, deviation 0.5 -> [[1.5, -0.5], [-0.5, -0.5]].
    """
    flat = iter(grpo([r for group in rewards for r in group], epsilon) if rewards else [])
    return [[next(flat) for _ in group] for group in rewards]


def _deviation(rewards: Sequence[float]) -> float:
    return math.hypot(*dr_grpo(rewards)) / math.sqrt(len(rewards) - 1)  # hypot: a square may underflow or overflow


def _ratio(advantage: float, deviation: float) -> float:
    """Return advantage / deviation, or 0 if the deviation is 0."""
    return advantage / deviation if deviation else 0.0


ADVANTAGES: dict[str, Advantage] = {
    "grpo": lambda rewards, epsilon: [grpo(group, epsilon) for group in rewards],
    "grpo_batch": grpo_batch,
    "dr_grpo": lambda rewards, _: [dr_grpo(group) for group in rewards],
    "rloo": lambda rewards, _: [rloo(group) for group in rewards],
    "reinforce_pp": reinforce_pp,
}
OF_ONE_GROUP = frozenset({"grpo", "dr_grpo", "rloo"})
"""Estimators whose advantages depend on the rewards of one group only. Idle workers may compute a group's gradients
before the other groups are finished."""
WITH_BATCH_MEAN = frozenset({"reinforce_pp"})
"""Estimators that subtract the mean of all rewards. A group of equal rewards may have advantages other than 0."""
