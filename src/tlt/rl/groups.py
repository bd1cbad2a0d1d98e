"""Training batch of a step, made from groups with rewards: choice of usable groups, and advantages.

The order in which responses arrive has no influence. Groups are in prompt order, responses in order of their index.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

from tlt.config import Config, TrainConfig
from tlt.rl.advantages import ADVANTAGES, Rewards
from tlt.types import Group, PassCounts, Prompt, Reply, Request, Response, SamplingParams, TrainBatch


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
