"""Passes of policy and reference model over micro-batches, and their progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tlt.config import ConfigError, RolloutConfig, TrainConfig
from tlt.files import first_line
from tlt.rl.batching import MicroBatch, Packer
from tlt.rl.engine_forward import EngineForward, can_follow
from tlt.rl.logprobs import Forward, TransformersForward, token_logprobs
from tlt.rl.losses import Objective
from tlt.rl.parallel import ProcessGroup
from tlt.rl.shared_prefix import share_prefixes
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
    """Forward passes of the policy and the reference model."""

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
        self.progress = UpdateProgress()

    def logprobs(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the log-prob and the entropy of each target token of a micro-batch, [T] each."""
        return token_logprobs(self.forwards[id(model)], micro, self.temperature)

    def forward_of(self, model: Any, autocast: bool) -> Forward:
        """Return the forward pass of the policy or the reference model, by the engine's operations if possible."""
        dtype = torch.bfloat16 if autocast else model.dtype
        if can_follow(model, dtype):
            return EngineForward(model, dtype, self.config.gradient_checkpointing)
        return TransformersForward(model, autocast)

    def micro_batches(
        self, models: Sequence[Any], batch: TrainBatch, members: Sequence[int], group: ProcessGroup | None = None
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the responses `members`, each for a pass through all `models`."""
        for layout in self.packer.plan(batch, members):
            micro = self.packer.pack(batch, layout)
            yield micro
            tokens = sum(batch.lengths(micro.sequences))
            self.progress.add(tokens * (BACKWARD_PASSES if torch.is_grad_enabled() else len(models)))

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
