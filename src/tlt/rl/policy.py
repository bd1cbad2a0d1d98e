"""The policy: a model that is trained by reinforcement learning, and its update on a rollout."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.config import RolloutConfig, TrainConfig
from tlt.models.hugging_face import load_model
from tlt.rl.early import has_early_gradients
from tlt.rl.finite import NotFinite, refuse_weights
from tlt.rl.logprobs import sequence_logits
from tlt.rl.parallel import Alone, ProcessGroup
from tlt.rl.passes import Passes
from tlt.rl.shards import GradientShards, Held, LogprobShards
from tlt.rl.trained_model import TrainedModel
from tlt.rl.update import Update, learning_rate
from tlt.types import TrainBatch

log = logging.getLogger(__name__)


class Policy(TrainedModel):
    """Trained model with the method that updates it. If `train.kl_weight` is set, it also keeps the model that training
    started from, as the frozen `reference`. In float32 the reference takes 4 bytes per parameter."""

    passes_type: type[Passes] = Passes

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        config: TrainConfig,
        rollout: RolloutConfig,
        reference: str | Path | None = None,
    ) -> None:
        super().__init__(folder, dtype, device, config, base=reference or folder)
        home = self.home or device
        self.reference: Any = load_model(self.base, self.model.dtype, home) if config.kl_weight else None
        self.passes = self.passes_type(self.model, self.reference, config, rollout, device, self.autocast)
        self.gradients = GradientShards(self.passes, rollout.prompts_per_step)
        self.logprob_shards = LogprobShards(self.passes, rollout.prompts_per_step)
        self.early = self.gradients if has_early_gradients(config) else self.logprob_shards
        self._skipped_step: int | None = None  # last step in which no gradient was finite

    def update(
        self, batch: TrainBatch, step: int, group: ProcessGroup | None = None, held: Held = ()
    ) -> dict[str, float]:
        """Take the optimizer steps of one rollout. Return the metrics of the update (docs/metrics.md). A batch without
        responses changes nothing. Raises NotFinite, GroupBroken.

        Every member of a process `group` passes the same whole batch, and has bitwise the same weights afterwards.
        `held`: early shards that each member has begun, with the fraction that is done."""
        group, rate = group or Alone(), learning_rate(self.config, step)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = rate
        self.passes.progress.reset()
        metrics = Update(self, self.gradients, self.logprob_shards, batch, step, group, held).run()
        refuse_weights(self.own_weights(), group, f"after step {step + 1}")
        self._refuse_second_skip(metrics["skipped"] == 1.0, step)
        self.version: int | None = step + 1
        self.passes.progress.reset()
        return metrics | {"learning_rate": rate}

    def _refuse_second_skip(self, skipped: bool, step: int) -> None:
        """Log a warning if no gradient of this step was finite, and raise NotFinite if that happens in two steps in a
        row. A step that is repeated because a member was lost counts once."""
        if not skipped:
            return
        if self._skipped_step == step - 1:
            raise NotFinite(f"no gradient of steps {step} and {step + 1} is finite: lower train.learning_rate")
        log.warning(
            "no gradient of step %d is finite, so no weight changed: two such steps in a row end the run", step + 1
        )
        self._skipped_step = step

    def early_update(self, number: int, batch: TrainBatch, stop: Callable[[], bool]) -> float:
        """Compute, or continue to compute, the gradient or the log-probs of an early shard until `stop` returns True
        after a micro-batch. Return the share that is done. The next update uses the result."""
        return self.early.continue_early(number, batch, stop)

    def forget_early(self) -> None:
        """Drop all gradients and log-probs of early shards."""
        self.early.forget()

    @property
    def updated(self) -> float:
        """Share of the current update that is done, or 0 while there is no update. Other threads may read it."""
        return self.passes.progress.done

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch, group: ProcessGroup | None = None) -> list[list[float]]:
        """Return the log-probs of each response's sampled tokens under the current policy."""
        members, found = range(len(batch.response_ids)), dict[int, list[float]]()
        for micro in self.passes.micro_batches([self.model], batch, members, group):
            logprobs, _ = self.passes.logprobs(self.model, micro)
            lengths = [batch.num_sampled(i) for i in micro.sequences]
            found |= zip(micro.sequences, (of_one.tolist() for of_one in logprobs.split(lengths)), strict=True)
        return [found[i] for i in members]

    @torch.no_grad()
    def logits(self, tokens: Tensor, autocast: bool = True) -> Tensor:
        """Return logits [N, V] at each token of one sequence [N]. Without `autocast` they are computed in the dtype of
        the master weights."""
        return sequence_logits(self.model, tokens.to(self.model.device), self.autocast and autocast)
