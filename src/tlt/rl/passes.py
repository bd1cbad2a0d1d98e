"""Forward and backward passes over shards: gradients of the policy, and log-probs of policy and reference model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tlt.config import ConfigError, RolloutConfig, TrainConfig
from tlt.files import first_line
from tlt.rl.batching import MicroBatch
from tlt.rl.early import fixed_logprobs, has_early_gradients
from tlt.rl.engine_forward import EngineForward, can_follow
from tlt.rl.logprobs import FixedLogprobs, Forward, TransformersForward, rollout_logprobs, token_logprobs
from tlt.rl.losses import Objective
from tlt.rl.measure import TokenMetrics
from tlt.rl.parallel import Alone, ProcessGroup
from tlt.rl.planner import Packer
from tlt.rl.shard_sum import Plan, Shard, ShardSum, ShardSums
from tlt.rl.shared_prefix import share_prefixes
from tlt.rl.trained_model import trained_parameters
from tlt.types import TrainBatch

BACKWARD_PASSES = 3  # forward and backward pass together take as long as this number of forward passes


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms inside the context, if `enabled`.

    Without these algorithms, CUDA sums the gradient of attention in an order that varies. Raises ConfigError if an
    operation has no deterministic algorithm."""
    settings: Any = torch.utils.deterministic
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = settings.fill_uninitialized_memory
    if enabled:
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # filling memory takes time and only helps to find bugs
    try:
        yield
    except RuntimeError as error:
        if not enabled or "deterministic implementation" not in str(error):
            raise
        raise ConfigError(
            f"a gradient cannot be added up in a fixed order on CUDA ({first_line(error)}): set train.deterministic = "
            "false; two runs may then differ in rounding"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fills


class Passes:
    """Computation of the gradients and log-probs of shards, one micro-batch at a time."""

    def __init__(
        self,
        model: Any,
        reference: Any,
        config: TrainConfig,
        rollout: RolloutConfig,
        device: torch.device,
        autocast: bool,
    ) -> None:
        self.model, self.reference, self.config, self.device = model, reference, config, device
        self.temperature = rollout.temperature
        self.forwards = {id(one): self.forward_of(one, autocast) for one in (model, reference) if one}
        self.objective = Objective(config, rollout)
        shares = all(share_prefixes(model) for model in (self.model, self.reference) if model)
        self.packer = Packer(config.micro_batch_tokens, device, shares)
        self.gradients = ShardSums(lambda: trained_parameters(model), self.begin_gradient, self._add_gradient)
        self.logprob_sums = ShardSums(lambda: [], self.begin_logprobs, self._add_logprobs)
        self.early = self.gradients if has_early_gradients(config) else self.logprob_sums
        self.progress = UpdateProgress()

    def logprobs(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the log-prob and the entropy of each target token of a micro-batch, [T] each."""
        return token_logprobs(self.forwards[id(model)], micro, self.temperature, self.config.logits_mb)

    def forward_of(self, model: Any, autocast: bool) -> Forward:
        """Return the forward pass of the policy or the reference model, by the engine's operations if possible."""
        dtype = torch.bfloat16 if autocast else model.dtype
        if can_follow(model, dtype):
            return EngineForward(model, dtype, self.config.gradient_checkpointing)
        return TransformersForward(model, autocast)

    def micro_batches(
        self, models: Sequence[Any], batch: TrainBatch, members: Sequence[int], group: ProcessGroup
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the responses `members`, each for a pass through all `models`."""
        for layout in self.packer.plan(batch, members):
            micro = self.packer.pack(batch, layout)
            yield micro
            tokens = sum(batch.lengths(micro.sequences))
            self.progress.add(tokens * (BACKWARD_PASSES if torch.is_grad_enabled() else len(models)))

    def expect(self, plans: Sequence[Plan], passes: int, end: float) -> None:
        """Scale the progress so that it reaches `end` (0 to 1) when this member has computed its shards of these plans.
        Shards that were begun early do not count. `passes`: cost of each token, in forward passes."""
        left = [shard for plan in plans for shard in plan.own if shard.number not in self.early.early]
        self.progress.expect(passes * sum(sum(shard.batch.lengths(shard.members)) for shard in left), end)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def begin_gradient(
        self, shard: Shard, fixed: FixedLogprobs | None = None, group: ProcessGroup | None = None
    ) -> ShardSum:
        return self._empty_sum([self.model], shard, fixed or FixedLogprobs(self.carried(shard.batch), {}), group)

    def _add_gradient(self, to: ShardSum, micro: MicroBatch) -> None:
        """Compute the gradient of one micro-batch, and add it to the parameters' gradients. Add its metrics to `to`."""
        batch = to.shard.batch
        logprobs, entropy = self.logprobs(self.model, micro)
        inputs = self.objective.inputs(batch, micro, logprobs, to.fixed.old)
        reference = self._reference_logprobs(to.fixed, micro) if self.objective.kl_in_loss else None
        loss, found = self.objective.on(inputs, reference)
        with deterministic(self.config.deterministic and self.device.type == "cuda"):  # CPUs have a fixed order
            loss.backward()
        for name, value in found.items():
            to.totals[name] += value
        to.tokens.add(inputs.old_logprobs, rollout_logprobs(batch, micro, logprobs), entropy)
        if not to.wrong and not math.isfinite(to.totals["loss"]):
            to.wrong = "the loss" if logprobs.isfinite().all() else "a log-prob of the policy"

    @torch.no_grad()
    def _reference_logprobs(self, fixed: FixedLogprobs, micro: MicroBatch) -> Tensor:
        if fixed.reference:
            return torch.cat([fixed.reference[i] for i in micro.sequences])
        return self.logprobs(self.reference, micro)[0]

    # -- log-probs that stay fixed during an update --------------------------------------------------------------------

    @property
    def fixed_models(self) -> dict[str, Any]:
        """Models whose log-probs stay fixed during an update, by field of `FixedLogprobs`."""
        models = {"old": self.model, "reference": self.reference}
        return {name: models[name] for name in fixed_logprobs(self.config)}

    def begin_logprobs(self, shard: Shard, group: ProcessGroup | None = None) -> ShardSum:
        return self._empty_sum([*self.fixed_models.values()], shard, FixedLogprobs({}, {}), group)

    def _add_logprobs(self, to: ShardSum, micro: MicroBatch) -> None:
        """Compute the fixed log-probs of one micro-batch, and add them to `to`."""
        lengths = [to.shard.batch.num_sampled(i) for i in micro.sequences]
        to.totals["tokens"] += sum(lengths)
        for name, model in self.fixed_models.items():
            logprobs, _ = self.logprobs(model, micro)
            getattr(to.fixed, name).update(zip(micro.sequences, logprobs.split(lengths), strict=True))

    def _empty_sum(
        self, models: Sequence[Any], shard: Shard, fixed: FixedLogprobs, group: ProcessGroup | None
    ) -> ShardSum:
        micro_batches = self.micro_batches(models, shard.batch, shard.members, group or Alone())
        return ShardSum(shard, fixed, micro_batches, TokenMetrics(self.device))

    def carried(self, batch: TrainBatch) -> dict[int, Tensor]:
        """Return the old log-probs of responses kept from an earlier step, as response index -> log-probs."""
        return {i: self.widened(of_one) for i, of_one in batch.old_logprobs.items()}

    def widened(self, logprobs: Sequence[float]) -> Tensor:
        """Return log-probs as a float32 tensor, or as float64 if the model is float64."""
        dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        return torch.tensor(logprobs, dtype=dtype, device=self.device)


class UpdateProgress:
    """Share of an update that is done, from 0 to 1. Other threads may read `done`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.done, self._each = 0.0, 0.0  # share of the update that is done; share that one token's forward pass adds

    def expect(self, tokens: int, end: float) -> None:
        """Let `done` grow to `end` while this number of tokens goes through the model."""
        self._each = (end - self.done) / max(1, tokens)

    def add(self, tokens: int) -> None:
        self.done += tokens * self._each
