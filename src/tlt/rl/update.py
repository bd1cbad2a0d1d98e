"""One update of the policy on the responses of a rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tlt.config import TrainConfig
from tlt.rl.early import fixed_logprobs, has_gradient, needs_logprobs
from tlt.rl.finite import refuse_loss
from tlt.rl.logprobs import FixedLogprobs, exchange, old_logprobs, penalized, rollout_logprobs
from tlt.rl.measure import TokenMetrics
from tlt.rl.parallel import ProcessGroup, numbers_of
from tlt.rl.passes import BACKWARD_PASSES, Passes
from tlt.rl.shards import TOTALS, GradientShards, Held, LogprobShards, Plan, ShardSum
from tlt.rl.trained_model import TrainedModel
from tlt.types import TrainBatch

_ONE_IN = 8  # token metrics include one in 8 of the responses without a gradient


def split(count: int, parts: int) -> list[range]:
    """Split the indices of `count` responses evenly into at most `parts` mini-batches. Empty ones are left out."""
    borders = [round(count * k / parts) for k in range(parts + 1)]
    return [range(lo, hi) for lo, hi in pairwise(borders) if hi > lo]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step. Steps count from 0.

    It rises linearly over `warmup_steps`, then follows `train.schedule`, and is above 0 at the last step."""
    if step < config.warmup_steps or config.schedule == "constant":
        return config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))
    gone = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    return config.learning_rate * (1 - gone if config.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2)


@dataclass
class Update:
    """Optimizer steps on the responses of one rollout. Each member of `group` computes its shards of every step."""

    trained: TrainedModel
    gradients: GradientShards
    logprobs: LogprobShards
    batch: TrainBatch
    step: int
    group: ProcessGroup
    held: Held
    """early shards that each member has begun, with the fraction that is done"""

    @property
    def passes(self) -> Passes:
        return self.gradients.passes

    def run(self) -> dict[str, float]:
        """Take all optimizer steps. Return the mean of each metric over them."""
        config, fixed, metrics = self.passes.config, None, dict[str, float]()
        if fixed_logprobs(config):
            fixed, metrics["early"] = self.compute_fixed()
            if self.passes.reference and config.kl_in == "reward":
                self.batch, metrics["kl"] = penalized(self.batch, fixed, self.passes.objective.kl, config)
        mini_batches = split(len(self.batch.response_ids), config.updates_per_step)
        plans = [self.gradients.plan(self.batch, some, self.group, self.held) for some in mini_batches]
        self.gradients.expect(plans, BACKWARD_PASSES * config.epochs, 1.0)
        # token metrics are those of the first epoch only, because each epoch changes the policy
        tokens = [TokenMetrics(self.passes.device) for _ in range(config.epochs)]
        self._sample_untaught(tokens[0])
        reports = [
            self._optimizer_step(members, plan, fixed, seen)
            for seen in tokens
            for members, plan in zip(mini_batches, plans, strict=True)
        ]
        names = ("loss", "clipped", "grad_norm", "skipped", "early", *(["kl"] if self.passes.reference else []))
        means = {name: sum(report[name] for report in reports) / max(1, len(reports)) for name in names}
        return means | metrics | tokens[0].over(self.group)

    def compute_fixed(self) -> tuple[FixedLogprobs, float]:
        """Compute the log-probs that stay fixed during the update. Each member computes those of its shards. Return the
        log-probs of all members, and the share of tokens whose log-probs were computed early."""
        passes, batch, group = self.passes, self.batch, self.group
        models, everyone = self.logprobs.models, range(len(batch.response_ids))
        plan = self.logprobs.plan(batch, everyone, group, self.held)
        self.logprobs.expect([plan], len(models), len(models) / (len(models) + BACKWARD_PASSES * passes.config.epochs))
        found = self.logprobs.compute(plan, None, group)
        counted = [i for i in everyone if needs_logprobs(batch, i, passes.config)]
        lengths, like = {i: batch.num_sampled(i) for i in counted}, passes.widened([])
        fixed = FixedLogprobs({}, {})
        for name in models:
            own = {plan.in_batch(one.shard, i): x for one in found for i, x in getattr(one.fixed, name).items()}
            getattr(fixed, name).update(exchange(own, lengths, group, like))
        fixed.old.update(passes.carried(batch))
        sums = self._totals(found, plan)
        return fixed, sums["early"] / (sums["tokens"] or 1.0)

    def _optimizer_step(
        self, members: range, plan: Plan, fixed: FixedLogprobs | None, tokens: TokenMetrics
    ) -> dict[str, float]:
        """Take one optimizer step on a mini-batch, and return its metrics. `members`: its response indices. The metrics
        of its tokens are added to `tokens`."""
        passes = self.passes
        found = self.gradients.compute(plan, fixed, self.group)
        for one in found:
            tokens.add_all(one.tokens)
        sums = self._totals(found, plan)
        refuse_loss(sums["loss"], next((one.wrong for one in found if one.wrong), ""), self.step)
        total = passes.objective.total(self.batch, members)
        norm = self.trained.apply_gradients(self.group, [one.gradients for one in found], plan.owners, total)
        means = {name: sums[name] / (sums["weight"] or 1.0) for name in ("clipped", "kl")}
        early = sums["early"] / (sums["tokens"] or 1.0)
        skipped = float(not math.isfinite(norm))
        return {"loss": sums["loss"] / total, **means, "early": early, "grad_norm": norm, "skipped": skipped}

    def _totals(self, found: Sequence[ShardSum], plan: Plan) -> dict[str, float]:
        """Return the `TOTALS` of shards, summed over all members."""
        own = torch.tensor([[*one.totals.values()] for one in found], dtype=torch.float64, device=self.passes.device)
        return dict(zip(TOTALS, self.group.sum_shards(own, plan.owners).tolist(), strict=True))

    @torch.no_grad()
    def _sample_untaught(self, tokens: TokenMetrics) -> None:
        """Add one in 8 of the responses without a gradient to `tokens`, so that token metrics cover the whole batch.

        Computing all of them would make the update up to a third longer."""
        passes, batch = self.passes, self.batch
        untaught = [i for i in range(len(batch.response_ids)) if not has_gradient(batch, i, passes.config)]
        sample = untaught[::_ONE_IN]
        count, drawn = (sum(map(batch.num_sampled, some)) for some in (untaught, sample))
        carried = passes.carried(batch)
        shards = passes.packer.all_shards(batch, sample, self.group.shards)
        for number in numbers_of(self.group.rank, self.group.size, self.group.shards):
            for micro in passes.micro_batches([passes.model], batch, shards[number], self.group):
                logprobs, entropy = passes.logprobs(passes.model, micro)
                old = old_logprobs(batch, micro, logprobs, carried)
                tokens.add(old, rollout_logprobs(batch, micro, logprobs), entropy, weight=count / drawn)
