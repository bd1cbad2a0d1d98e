"""Groups of responses: which can be trained on, their advantages, and the training batch of a step.

`train.advantage` selects an advantage estimator, which turns rewards into one advantage per response. Groups are in
prompt order, responses in order of their index. The order in which responses arrive has no influence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from tlt.config import Config, TrainConfig
from tlt.types import Group, PassCounts, Prompt, Reply, Request, Response, SamplingParams, TrainBatch

Rewards = Sequence[Sequence[float]]
"""Rewards as [group][response]. Every group has at least two responses."""
Advantage = Callable[[Rewards, float], list[list[float]]]
"""Advantage estimator: a function of the rewards and of epsilon that returns advantages as [group][response]."""


def grpo(rewards: Sequence[float], epsilon: float) -> list[float]:
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


def grpo_batch(rewards: Rewards, epsilon: float) -> list[list[float]]:
    """Return Lite PPO advantages (arXiv 2508.08221): (reward - group mean) / (standard deviation + epsilon).

    The standard deviation is that of all rewards of the rollout, and divides by n - 1. A group with little spread
    therefore gets small advantages. [[1, 0], [0, 0]] -> means 0.5 and 0, deviation 0.5 -> [[1, -1], [0, 0]].
    """
    if not rewards:
        return []
    deviation = _deviation([r for group in rewards for r in group])
    return [[_ratio(a, deviation + epsilon) for a in dr_grpo(group)] for group in rewards]


def reinforce_pp(rewards: Rewards, epsilon: float) -> list[list[float]]:
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


def rewards_of(group: Group) -> list[float]:
    """Return the rewards of a group. A response without a reward is left out. It does not count as 0."""
    return [response.reward for response in group.responses if response.reward is not None]


def is_comparable(group: Group) -> bool:
    """Return whether at least two responses of a group have a reward."""
    return len(rewards_of(group)) > 1


def has_spread(group: Group) -> bool:
    """Return whether a group's rewards differ (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2)."""
    return is_comparable(group) and min(rewards_of(group)) < max(rewards_of(group))


def usable(groups: Sequence[Group], config: Config) -> list[Group]:
    """Return the groups that can be trained on. With dynamic sampling (`rollout.max_waves` > 0), the rewards of a group
    must differ. Otherwise at least two of its responses must have a reward."""
    return [group for group in groups if (has_spread if config.rollout.max_waves else is_comparable)(group)]


def make_batch(groups: Sequence[Group], config: Config) -> TrainBatch:
    """Return the training batch of usable groups, without responses that have no reward. Set each response's
    `advantage`."""
    kept = [rewarded(group) for group in groups]
    rewards = [rewards_of(group) for group in groups]
    batch = TrainBatch([], [], [], [], rewards=rewards)
    for responses, advantages in zip(kept, advantages_of(rewards, config.train), strict=True):
        for response, advantage in zip(responses, advantages, strict=True):
            number = len(batch.response_ids)
            batch.prompt_ids.append(response.request.prompt.token_ids)
            batch.response_ids.append(response.token_ids)
            batch.advantages.append(advantage)
            response.advantage = advantage
            batch.rollout_logprobs.append(list(compress(response.full_logprobs, response.mask)))
            if response.replies:
                batch.masks[number] = response.mask
            if response.old_logprobs is not None:
                batch.old_logprobs[number] = response.old_logprobs
            if config.train.mask_truncated and response.is_truncated:
                batch.masked.add(number)
    return batch


def rewarded(group: Group) -> list[Response]:
    return [response for response in group.responses if response.reward is not None]


def advantages_of(rewards: Rewards, train: TrainConfig) -> list[list[float]]:
    return ADVANTAGES[train.advantage](rewards, train.advantage_epsilon)


def to_plain(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return groups as JSON values for a checkpoint. A prompt is stored as its row number in the data."""
    return [
        {"row": group.prompt.prompt_id, "responses": [_plain_response(response) for response in group.responses]}
        for group in groups
    ]


def _plain_response(response: Response) -> dict[str, Any]:
    request = response.request
    named = {"index": request.index, "epoch": request.epoch, "seed": request.seed}
    return vars(response) | {"request": named, "decoded": vars(response.decoded)}


def from_plain(plain: Sequence[dict[str, Any]], prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Group]:
    """Return the groups that `to_plain` stored. `prompts` has all prompts, by row number."""

    def response(prompt: Prompt, fields: dict[str, Any]) -> Response:
        request = Request(prompt, **fields["request"], sampling=sampling)
        replies = [Reply(*reply) for reply in fields["replies"]]
        return Response(**fields | {"request": request, "decoded": PassCounts(**fields["decoded"]), "replies": replies})

    return [
        Group(prompts[group["row"]], [response(prompts[group["row"]], fields) for fields in group["responses"]])
        for group in plain
    ]
