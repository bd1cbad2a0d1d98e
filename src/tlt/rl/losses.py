"""Losses over the tokens of packed responses. Each log-prob is named by who made it; T response tokens in all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LossInputs(NamedTuple):
    policy_logprobs: Tensor
    """[T] of the policy being trained, with gradient"""
    old_logprobs: Tensor
    """[T] of the policy before the first gradient step on this rollout, recomputed by the trainer"""
    advantages: Tensor
    """[T] its response's advantage"""
    weights: Tensor
    """[T] share of each token in the loss; they sum to 1 over an optimizer step"""


class LossOutputs(NamedTuple):
    loss: Tensor
    clipped: Tensor
    """weighted share of tokens whose ratio was clipped"""


def clipped_policy_loss(inputs: LossInputs, clip_low: float, clip_high: float) -> LossOutputs:
    """The clipped surrogate of PPO as GRPO uses it (arXiv 1707.06347, 2402.03300): -min(r A, clip(r, 1 - low, 1 +
    high) A).

    r = exp(policy - old). For A = 1, r = 1.5, high = 0.2 a token gives -1.2 and no gradient; for A = -1 it gives 1.5.
    """
    ratio = torch.exp(inputs.policy_logprobs - inputs.old_logprobs)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain, clipped = ratio * inputs.advantages, bounded * inputs.advantages
    loss = -(torch.minimum(plain, clipped) * inputs.weights).sum()
    return LossOutputs(loss, ((clipped < plain) * inputs.weights).sum().detach())
