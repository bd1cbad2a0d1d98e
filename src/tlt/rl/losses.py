"""Losses over the tokens of packed responses, by the name that `train.loss` gives.

A loss is a surrogate, a share of it for each token, and the clip its authors use. Each log-prob is named by who made
it; T response tokens in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_FARTHEST = 20.0  # a log-ratio beyond this counts as this (as in verl): its exponential must stay finite


class Clip(NamedTuple):
    """The ratio r = policy / old is clipped to [1 - low, 1 + high] where that makes the surrogate smaller. Where the
    advantage is negative it counts as at most `dual` (dual clip, arXiv 1912.09729), which keeps the loss finite."""

    low: float
    high: float
    dual: float = math.inf


class LossInputs(NamedTuple):
    policy_logprobs: Tensor
    """[T] of the policy being trained, with gradient"""
    old_logprobs: Tensor
    """[T] of the policy that decoded the response, by the trainer"""
    advantages: Tensor
    """[T] its response's advantage"""
    weights: Tensor
    """[T] share of each token in the loss"""
    lengths: Sequence[int]
    """tokens of each response, in their order; they sum to T"""
    importance: Tensor | float = 1.0
    """[T] a further factor of each token's loss"""


class LossOutputs(NamedTuple):
    loss: Tensor
    clipped: Tensor
    """weighted count of tokens whose ratio was clipped"""
    ratio: Tensor
    """[T] with gradient"""


# -- surrogates --------------------------------------------------------------------------------------------------------


def clipped_policy_loss(inputs: LossInputs, clip: Clip) -> LossOutputs:
    """The clipped surrogate of PPO as GRPO uses it (arXiv 1707.06347, 2402.03300): -min(r A, clip(r, 1 - low, 1 +
    high) A).

    r = exp(policy - old). For A = 1, r = 1.5, high = 0.2 a token gives -1.2 and no gradient; for A = -1 it gives 1.5.
    """
    return _clipped(inputs.policy_logprobs - inputs.old_logprobs, inputs, clip)


def sequence_policy_loss(inputs: LossInputs, clip: Clip) -> LossOutputs:
    """GSPO (arXiv 2507.18071): the same with one ratio a response, exp(mean over its tokens of policy - old)."""
    apart = (inputs.policy_logprobs - inputs.old_logprobs).split(list(inputs.lengths))
    means = torch.stack([response.mean() for response in apart])
    repeats = torch.tensor(inputs.lengths, device=means.device)
    return _clipped(means.repeat_interleave(repeats), inputs, clip)


def _clipped(log_ratio: Tensor, inputs: LossInputs, clip: Clip) -> LossOutputs:
    ratio = torch.exp(log_ratio.clamp(-_FARTHEST, _FARTHEST))
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high)
    plain, clipped = ratio.clamp(max=clip.dual) * inputs.advantages, bounded * inputs.advantages
    loss = -(torch.minimum(plain, clipped) * inputs.weights * inputs.importance).sum()
    return LossOutputs(loss, ((clipped < plain) * inputs.weights).sum().detach(), ratio)


# -- shares ------------------------------------------------------------------------------------------------------------
# A token's share in the loss is a weight over a total. The weight depends on its own response alone, so a gradient can
# be computed before the other responses are known. The total is that of all responses of an optimizer step. A length of
# 0 stands for a response that is masked: it counts as a response, and none of its tokens does.


class Share(NamedTuple):
    weight: Callable[[int, int], float]
    """(tokens of the response, tokens of the longest that is allowed) -> weight of each of its tokens"""
    total: Callable[[Sequence[int]], int]
    """tokens of each response -> the number that divides the weights"""


def _count(lengths: Sequence[int]) -> int:
    return max(1, len(lengths))


def _tokens(lengths: Sequence[int]) -> int:
    return max(1, sum(lengths))


by_response = Share(lambda length, longest: 1 / max(1, length), _count)
"""Every response counts the same: [2, 4] -> [1/4, 1/8]."""
by_token = Share(lambda length, longest: 1.0, _tokens)
"""Every token counts the same: [2, 4] -> [1/6, 1/6]."""
by_longest = Share(lambda length, longest: 1 / longest, _count)
"""Every token counts the same, by a number that the lengths leave alone: [2, 4], longest 8 -> [1/16, 1/16]."""


class Loss(NamedTuple):
    surrogate: Callable[[LossInputs, Clip], LossOutputs]
    share: Share
    clip_low: float
    clip_high: float


LOSSES = {
    "ppo": Loss(clipped_policy_loss, by_token, 0.2, 0.2),  # as verl and, under the name of dapo, TRL have it
    "grpo": Loss(clipped_policy_loss, by_response, 0.2, 0.2),
    "dapo": Loss(clipped_policy_loss, by_token, 0.2, 0.28),  # arXiv 2503.14476
    "dr_grpo": Loss(clipped_policy_loss, by_longest, 0.2, 0.2),  # arXiv 2503.20783
    "gspo": Loss(sequence_policy_loss, by_response, 3e-4, 4e-4),
}


# -- what may be added -------------------------------------------------------------------------------------------------


def k1(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[T] log-ratio policy / reference: its mean is KL(policy | reference), and the mean of its gradient is 0."""
    return policy_logprobs - reference_logprobs


def k2(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[T] half the log-ratio's square: biased, but the mean of its gradient is that of the divergence."""
    return (policy_logprobs - reference_logprobs).square() / 2


def k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[T] never negative, and of mean KL(policy | reference): d = reference - policy, exp(d) - d - 1."""
    apart = reference_logprobs - policy_logprobs
    return torch.exp(apart.clamp(max=_FARTHEST)) - apart - 1


KL = {"k1": k1, "k2": k2, "k3": k3}
"""Schulman's estimates of KL(policy | reference) at drawn tokens: joschu.net/blog/kl-approx.html"""


def truncated_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """[T] truncated importance weights min(exp(old - rollout), cap): they mend the gap between trainer and rollout."""
    return torch.exp(old_logprobs - rollout_logprobs).clamp(max=cap)
