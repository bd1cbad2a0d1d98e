"""Loss of a recipe, computed from the log-probs of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tlt.config import RolloutConfig, TrainConfig
from tlt.rl.batching import MicroBatch
from tlt.rl.logprobs import old_logprobs, rollout_logprobs
from tlt.rl.losses import KL, LOSSES, Clip, LossInputs, truncated_weights
from tlt.types import TrainBatch


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
        self.kl = KL[config.kl_estimator or ("k3" if config.kl_in == "loss" else "k1")]
        self.kl_in_loss = bool(config.kl_weight) and config.kl_in == "loss"

    def total(self, batch: TrainBatch, members: range) -> int:
        """Return the number by which the loss of an optimizer step is divided. `members`: indices of its responses."""
        return self.loss.share.total([0 if i in batch.masked else batch.num_sampled(i) for i in members])

    def on(self, inputs: LossInputs, reference: Tensor | None) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a micro-batch, with gradient, and its metrics, which are also sums over tokens.
        `reference`: log-probs [T] under the reference model if the loss has a KL term, else None."""
        loss, clipped, ratio = self.loss.surrogate(inputs, self.clip)
        found = {"clipped": clipped.item(), "weight": inputs.weights.sum().item(), "tokens": float(len(ratio))}
        if reference is not None:
            apart = self.kl(inputs.policy_logprobs, reference) * (ratio if self.config.kl_unbiased else 1.0)
            apart = (apart * inputs.weights).sum()
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
