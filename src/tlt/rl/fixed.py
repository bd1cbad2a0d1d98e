"""Log-probs that are computed before the first gradient and stay fixed during an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.config import TrainConfig
from tlt.rl.groups import advantages_of
from tlt.rl.parallel import ProcessGroup
from tlt.types import TrainBatch


class FixedLogprobs(NamedTuple):
    """Log-probs that stay fixed during an update: response index -> log-probs of its sampled tokens. Log-probs that are
    missing here are computed with each micro-batch."""

    old: dict[int, Tensor]
    """log-probs under the policy that decoded the response, computed by the trainer"""
    reference: dict[int, Tensor]
    """log-probs under the reference model: the model that training started from"""


def exchange(
    own: Mapping[int, Tensor], lengths: Mapping[int, int], group: ProcessGroup, like: Tensor
) -> dict[int, Tensor]:
    """Return the log-probs computed by all members of a group, with the same bits on each member. `own`: log-probs of
    this member. `lengths`: number of sampled tokens of each response. `like`: a tensor of their dtype and device."""
    parts = [own[i] if i in own else like.new_zeros(length) for i, length in lengths.items()]
    whole = torch.cat([like.new_zeros(0), *parts])
    group.sum_(whole)  # one member has the log-prob, the other members have 0
    return dict(zip(lengths, whole.split([*lengths.values()]), strict=True))


def penalized(
    batch: TrainBatch, fixed: FixedLogprobs, kl: Callable[[Tensor, Tensor], Tensor], train: TrainConfig
) -> tuple[TrainBatch, float]:
    """Return the batch with a KL penalty, and the mean KL divergence per token. kl_weight times the KL divergence of a
    response, summed over its tokens, is subtracted from its reward. Advantages are computed from these rewards."""
    everyone = range(len(batch.response_ids))
    sums = [float(kl(fixed.old[i].double(), fixed.reference[i].double()).sum()) for i in everyone]
    left = iter(sums)
    rewards = [[reward - train.kl_weight * next(left) for reward in group] for group in batch.rewards]
    advantages = [advantage for group in advantages_of(rewards, train) for advantage in group]
    tokens = sum(map(batch.num_sampled, everyone))
    return replace(batch, rewards=rewards, advantages=advantages), sum(sums) / max(1, tokens)
