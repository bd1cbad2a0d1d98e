"""Losses over the tokens of packed responses, and the objective that adds the KL term. `train.loss` names a loss.

A loss has a surrogate objective, a weight for each token, and as default the clipping range of its paper. Each log-prob
is named after the model that computed it. T is the number of response tokens in a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.config import RolloutConfig, TrainConfig
from tlt.rl.batching import MicroBatch
from tlt.rl.logprobs import old_logprobs, rollout_logprobs
from tlt.types import TrainBatch

_FARTHEST = 20.0  # log-ratios are clamped to this limit (as in verl), so that exponentials stay finite


class Clip(NamedTuple):
    """Clipping range. The ratio r = policy / old is clipped to [1 - low, 1 + high] if that makes the surrogate smaller.

    r is a ratio of probabilities. If the advantage is negative, r is at most `dual` (dual clip, arXiv 1912.09729),
    which bounds the loss."""

    low: float
    high: float
    dual: float = math.inf


class LossInputs(NamedTuple):
    policy_logprobs: Tensor
    """[T] log-probs under the policy that is trained, with gradient"""
    old_logprobs: Tensor
    """[T] log-probs under the policy that decoded the response, computed by the trainer"""
    advantages: Tensor
    """[T] advantage of each token's response"""
    weights: Tensor
    """[T] weight of each token in the loss, before the division by the total"""
    lengths: Sequence[int]
    """number of sampled tokens of each response, in packing order; their sum is T"""
    importance: Tensor | float = 1.0
    """[T] importance weight by which the loss of each token is multiplied; 1.0 if not used"""


class LossOutputs(NamedTuple):
    loss: Tensor
    clipped: Tensor
    """sum of the weights of the tokens whose ratio was clipped"""
    ratio: Tensor
    """[T] probability ratio policy / old of each token, with gradient"""


# -- surrogates --------------------------------------------------------------------------------------------------------


def clipped_policy_loss(inputs: LossInputs, clip: Clip) -> LossOutputs:
    """Return PPO's clipped surrogate as in GRPO (arXiv 1707.06347, 2402.03300), summed over tokens.

    For a token it is -min(r A, clip(r, 1 - low, 1 + high) A) with advantage A and r = exp(policy - old). For A = 1, r =
    1.5, high = 0.2 it is -1.2 and has no gradient. For A = -1 it is 1.5.
    """
    return _clipped(inputs.policy_logprobs - inputs.old_logprobs, inputs, clip)


def sequence_policy_loss(inputs: LossInputs, clip: Clip) -> LossOutputs:
    """Return the GSPO loss (arXiv 2507.18071): the clipped surrogate with one ratio per response.

    The ratio is exp(m), where m is the mean of policy - old log-probs over the tokens of the response."""
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
# A token's share of the loss is a weight divided by a total. The weight depends on the token's own response alone, so a
# gradient can be computed before the other responses are known. The total is over all responses of an optimizer step.
# A masked response has length 0. It counts as a response, but none of its tokens counts.


class LossShare(NamedTuple):
    weight: Callable[[int, int], float]
    """function (tokens of a response, rollout.max_new_tokens) -> weight of each token of the response"""
    total: Callable[[Sequence[int]], int]
    """function (numbers of tokens of all responses) -> number by which the weights are divided"""


def _count(lengths: Sequence[int]) -> int:
    return max(1, len(lengths))


def _tokens(lengths: Sequence[int]) -> int:
    return max(1, sum(lengths))


by_response = LossShare(lambda length, longest: 1 / max(1, length), _count)
"""Share in which every response counts the same. With responses of 2 and 4 tokens, their tokens have shares of 1/4 and
1/8."""
by_token = LossShare(lambda length, longest: 1.0, _tokens)
"""Share in which every token counts the same. With responses of 2 and 4 tokens, every token has a share of 1/6."""
by_longest = LossShare(lambda length, longest: 1 / longest, _count)
"""Share in which every token counts the same, divided by `rollout.max_new_tokens` instead of actual lengths. With two
responses and a maximum of 8 tokens, every token has a share of 1/16."""


class Loss(NamedTuple):
    surrogate: Callable[[LossInputs, Clip], LossOutputs]
    share: LossShare
    clip_low: float
    clip_high: float


LOSSES = {
    "ppo": Loss(clipped_policy_loss, by_token, 0.2, 0.2),  # as in verl, and in TRL under the name dapo
    "grpo": Loss(clipped_policy_loss, by_response, 0.2, 0.2),
    "dapo": Loss(clipped_policy_loss, by_token, 0.2, 0.28),  # arXiv 2503.14476
    "dr_grpo": Loss(clipped_policy_loss, by_longest, 0.2, 0.2),  # arXiv 2503.20783
    "gspo": Loss(sequence_policy_loss, by_response, 3e-4, 4e-4),
}


# -- optional terms ----------------------------------------------------------------------------------------------------


def k1(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return KL estimator k1 [T]: the log-ratio policy / reference. Its mean is KL(policy | reference). Its mean
    gradient is 0."""
    return policy_logprobs - reference_logprobs


def k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return KL estimator k3 [T]: exp(d) - d - 1, d = reference - policy. It is never negative. Its mean is the KL."""
    apart = reference_logprobs - policy_logprobs
    return torch.exp(apart.clamp(max=_FARTHEST)) - apart - 1


KL = {"loss": k3, "reward": k1}
"""Schulman's estimator of KL(policy | reference) by `train.kl_in`: joschu.net/blog/kl-approx.html"""


def truncated_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """Return importance weights [T] that correct the mismatch of trainer and rollout: min(exp(old - rollout), cap)."""
    return torch.exp(old_logprobs - rollout_logprobs).clamp(max=cap)


class Objective:
    """Loss of a recipe, as a sum over tokens. The caller divides it by `total`, which is for a whole optimizer step."""

    def __init__(self, config: TrainConfig, rollout: RolloutConfig) -> None:
        self.config, self.longest = config, rollout.max_new_tokens
        self.loss = LOSSES[config.loss]
        self.clip = Clip(
            self.loss.clip_low if config.clip_low is None else config.clip_low,
            self.loss.clip_high if config.clip_high is None else config.clip_high,
            config.dual_clip or math.inf,
        )
        self.kl = KL[config.kl_in]
        self.kl_in_loss = bool(config.kl_weight) and config.kl_in == "loss"

    def total(self, batch: TrainBatch, members: range) -> int:
        """Return the number by which the loss of an optimizer step is divided. `members`: indices of its responses."""
        return self.loss.share.total([0 if i in batch.masked else batch.num_sampled(i) for i in members])

    def on(self, inputs: LossInputs, reference: Tensor | None) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a micro-batch, with gradient, and its metrics, which are also sums over tokens.
        `reference`: log-probs [T] under the reference model if the loss has a KL term, else None."""
        loss, clipped, ratio = self.loss.surrogate(inputs, self.clip)
        found = {"clipped": clipped.item(), "weight": inputs.weights.sum().item()}
        if reference is not None:
            apart = (self.kl(inputs.policy_logprobs, reference) * ratio * inputs.weights).sum()
            loss = loss + self.config.kl_weight * apart
            found["kl"] = apart.item()
        return loss, found | {"loss": loss.item()}

    def inputs(self, batch: TrainBatch, micro: MicroBatch, logprobs: Tensor, old: Mapping[int, Tensor]) -> LossInputs:
        lengths = [batch.num_sampled(i) for i in micro.sequences]
        before = old_logprobs(batch, micro, logprobs, old)
        repeats = torch.tensor(lengths, device=logprobs.device)

        def of_tokens(values: list[float]) -> Tensor:
            return logprobs.new_tensor(values).repeat_interleave(repeats)

        advantages = of_tokens([batch.advantages[i] for i in micro.sequences])
        weights = of_tokens([self.loss.share.weight(length, self.longest) for length in lengths])
        cap = self.config.importance_cap
        importance = truncated_weights(before, rollout_logprobs(batch, micro, before), cap) if cap else 1.0
        return LossInputs(logprobs, before, advantages, weights, lengths, importance)


# -- responses that are computed ---------------------------------------------------------------------------------------


def has_gradient(batch: TrainBatch, i: int, train: TrainConfig) -> bool:
    """Return whether the loss depends on response `i`: the response is not masked, and either its advantage is not 0 or
    the loss has a KL term."""
    kl_in_loss = bool(train.kl_weight) and train.kl_in == "loss"
    return (bool(batch.advantages[i]) or kl_in_loss) and i not in batch.masked


def fixed_logprobs(train: TrainConfig) -> tuple[str, ...]:
    """Return the kinds of log-probs that are computed before the first gradient and then stay fixed: names of fields of
    `FixedLogprobs`. If there is only one optimizer step, the old log-probs are not among them, because the policy is
    then still the one that decoded the responses."""
    old = train.updates_per_step * train.epochs > 1 or _has_kl_in_reward(train)
    return (*(["old"] if old else []), *(["reference"] if train.kl_weight else []))


def needs_logprobs(batch: TrainBatch, i: int, train: TrainConfig) -> bool:
    """Return whether the log-probs that `fixed_logprobs` names are computed for response `i`."""
    if _has_kl_in_reward(train):
        return True
    return has_gradient(batch, i, train) and (bool(train.kl_weight) or i not in batch.old_logprobs)


def _has_kl_in_reward(train: TrainConfig) -> bool:
    return bool(train.kl_weight) and train.kl_in == "reward"
