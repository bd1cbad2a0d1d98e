"""The policy that is trained: a Hugging Face model, its optimizer, and one update on a rollout."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from tlt.config import RolloutConfig, TrainConfig
from tlt.files import telling
from tlt.models import weights
from tlt.models.families import ModelError
from tlt.rl.batching import MicroBatch, pack, plan
from tlt.rl.finite import NotFinite, refuse_loss, refuse_weights
from tlt.rl.logprobs import sequence_logits, token_logprobs
from tlt.rl.losses import LOSSES, LossInputs, k3, truncated_weights
from tlt.rl.parallel import Alone, ProcessGroup, shard, sum_gradients
from tlt.rl.token_metrics import TokenMetrics
from tlt.types import TrainBatch

log = logging.getLogger(__name__)

_BACK = 3  # passes that one with its gradient takes as long as
_ONE_IN = 8  # of the responses that have no gradient, one in so many is measured


class Policy:
    """Masters are float32 (float64 if asked); dtype bfloat16 means autocast over them.

    In memory, for each parameter: its master, its gradient and Adam's two moments, 4 x 4 bytes in float32; and, where
    `kl_weight` is on, the frozen `reference` that training started from, 4 bytes more.
    """

    fused = True  # AdamW in one pass over each tensor

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        config: TrainConfig,
        rollout: RolloutConfig,
        reference: str | Path | None = None,
    ) -> None:
        self.config, self.rollout, self.device = config, rollout, device
        self.autocast = dtype == torch.bfloat16
        masters = torch.float32 if self.autocast else dtype
        self.model = _load(folder, masters, self._home())
        if config.gradient_checkpointing:
            _checkpoint_layers(self.model)
        self.reference = _load(reference or folder, masters, self._home()) if config.kl_weight else None
        self.loss = LOSSES[config.loss]
        self.clip = (
            self.loss.clip_low if config.clip_low is None else config.clip_low,
            self.loss.clip_high if config.clip_high is None else config.clip_high,
        )
        self.optimizer = self._make_optimizer()
        refuse_weights(self._own_weights(), Alone(), f"in {folder}", "fetch or save the model again")
        self._skipped = 0  # updates in a row that were left out as a whole
        self.version: int | None = 0
        """steps that it was updated in; None amid an update, once a weight has changed"""
        self.updated, self._token_share = 0.0, 0.0
        """share of the update under way that is done, which others may read at any time, 0 before and after; and a
        token's part of it"""

    def _home(self) -> torch.device:
        """Where models are loaded to."""
        return self.device

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.model.parameters(),
            lr=self.config.learning_rate,
            weight_decay=self.config.weight_decay,
            betas=(0.9, 0.95),
            fused=self.fused,
        )

    # -- update -------------------------------------------------------------------------------------------------------

    def update(self, batch: TrainBatch, step: int, group: ProcessGroup | None = None) -> dict[str, float]:
        """One rollout's optimizer steps. Micro-batches are formed from the order of prompts; returns scalar metrics.

        The members of a `group` hold the same policy and give the same whole batch; each takes its shard of every
        optimizer step, and all end with the same bits. Responses that have no gradient (an advantage of 0, as where
        all rewards of a group are alike, and no KL term) teach nothing: one in eight of them goes through the model
        once, for `entropy` and the mismatch, which are over all tokens of the batch. A batch without responses changes
        nothing, and its metrics are 0. `skipped` is the share of optimizer steps that were left out because their
        gradient was not finite.
        """
        group = group or Alone()
        rate = learning_rate(self.config, step)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = rate
        count = len(batch.response_ids)
        parts = self.config.updates_per_step
        borders = [round(count * k / parts) for k in range(parts + 1)]
        turns = [range(lo, hi) for lo, hi in pairwise(borders) if hi > lo]
        shards = [self._own(batch, members, group) for members in turns]
        self.updated, self._token_share = 0.0, self._share_of_a_token(batch, shards)
        tokens = TokenMetrics(self.device)
        self._look_at_untaught(batch, tokens, group)
        old = self._old_logprobs(batch, [i for own in shards for i in own], group) if parts > 1 else None
        reports = [
            self._optimizer_step(batch, members, own, old, tokens, step, group)
            for members, own in zip(turns, shards, strict=True)
        ]
        names = ("loss", "clipped", "grad_norm", "skipped", *(["kl"] if self.reference else []))
        metrics = {name: sum(r[name] for r in reports) / max(1, len(reports)) for name in names}
        metrics |= tokens.over(group)
        refuse_weights(self._own_weights(), group, f"after step {step + 1}")
        self._refuse_to_stand_still(metrics["skipped"] == 1.0, step)
        self.version, self.updated = step + 1, 0.0
        return metrics | {"learning_rate": rate}

    def _optimizer_step(
        self,
        batch: TrainBatch,
        members: range,
        own: Sequence[int],
        old: dict[int, Tensor] | None,
        tokens: TokenMetrics,
        step: int,
        group: ProcessGroup,
    ) -> dict[str, float]:
        lengths = [len(batch.response_ids[i]) for i in members]
        shares = dict(zip(members, self.loss.share(lengths, self.rollout.max_new_tokens), strict=True))
        totals = dict.fromkeys(("loss", "clipped", "kl", "weight"), 0.0)
        first_wrong = ""
        for micro in self._micro_batches(batch, own, group):
            logprobs, entropy = self._logprobs(self.model, micro)
            # with one optimizer step on a rollout the policy is still the old one: its log-probs need no second pass
            old_logprobs = logprobs.detach() if old is None else torch.cat([old[i] for i in micro.sequences])
            inputs = self._loss_inputs(batch, micro, logprobs, old_logprobs, shares)
            loss, clipped = self.loss.surrogate(inputs, *self.clip)
            if self.reference:
                with torch.no_grad():
                    reference, _ = self._logprobs(self.reference, micro)
                apart = (k3(logprobs, reference) * inputs.weights).sum()
                loss = loss + self.config.kl_weight * apart
                totals["kl"] += apart.item()
            loss.backward()
            totals["loss"] += loss.item()
            if not first_wrong and not math.isfinite(totals["loss"]):
                first_wrong = "the loss" if logprobs.isfinite().all() else "a log-prob of the policy"
            totals["clipped"] += clipped.item()
            totals["weight"] += inputs.weights.sum().item()
            tokens.add(batch, micro, old_logprobs, _rollout_logprobs(batch, micro, old_logprobs), entropy)
        sums = torch.tensor(list(totals.values()), dtype=torch.float64, device=self.device)
        group.sum_(sums)
        totals = dict(zip(totals, sums.tolist(), strict=True))
        refuse_loss(totals["loss"], first_wrong, step)
        norm, skipped = self._step(group)
        means = {name: totals[name] / (totals["weight"] or 1.0) for name in ("clipped", "kl")}
        return {"loss": totals["loss"], **means, "grad_norm": norm, "skipped": float(skipped)}

    def _step(self, group: ProcessGroup) -> tuple[float, bool]:
        """With the gradients of the whole group: their norm, and whether the step was left out."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:  # of a member without responses; and Adam's moments fade in a step without any
                parameter.grad = torch.zeros_like(parameter)
        norm = self._clip(parameters, group)
        skipped = not norm.isfinite()  # one step with it would spoil every weight for good
        if not skipped:
            self.version = None
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm), skipped

    def _own_weights(self) -> Iterable[tuple[str, Tensor]]:
        """This member's part of each."""
        return self.model.named_parameters()

    def _refuse_to_stand_still(self, skipped: bool, step: int) -> None:
        """One update without a finite gradient may pass, and is told."""
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped == 1:
            log.warning("no gradient of step %d is finite: it changed nothing, and a second one ends the run", step + 1)
        if self._skipped > 1:
            raise NotFinite(f"no gradient of steps {step} and {step + 1} is finite: lower train.learning_rate")

    def _clip(self, parameters: list[torch.nn.Parameter], group: ProcessGroup) -> Tensor:
        """Sum the group's gradients, and clip them; their norm before that."""
        sum_gradients(parameters, group)
        return torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)

    def _loss_inputs(
        self, batch: TrainBatch, micro: MicroBatch, logprobs: Tensor, old_logprobs: Tensor, shares: dict[int, float]
    ) -> LossInputs:
        lengths = [len(batch.response_ids[i]) for i in micro.sequences]
        repeats = torch.tensor(lengths, device=self.device)

        def of_tokens(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=logprobs.dtype, device=self.device).repeat_interleave(repeats)

        advantages = of_tokens([batch.advantages[i] for i in micro.sequences])
        weights = of_tokens([shares[i] for i in micro.sequences])
        cap = self.config.importance_cap
        importance = truncated_weights(old_logprobs, _rollout_logprobs(batch, micro, old_logprobs), cap) if cap else 1.0
        return LossInputs(logprobs, old_logprobs, advantages, weights, lengths, importance)

    @torch.no_grad()
    def _old_logprobs(self, batch: TrainBatch, members: Sequence[int], group: ProcessGroup) -> dict[int, Tensor]:
        """response -> [its tokens], before the first gradient step."""
        found: dict[int, Tensor] = {}
        for micro in self._micro_batches(batch, members, group):
            logprobs, _ = self._logprobs(self.model, micro)
            lengths = [len(batch.response_ids[i]) for i in micro.sequences]
            found |= zip(micro.sequences, logprobs.split(lengths), strict=True)
        return found

    def _own(self, batch: TrainBatch, members: Sequence[int], group: ProcessGroup) -> list[int]:
        """This member's share of those that have a gradient."""
        taught = [i for i in members if self._teaches(batch, i)]
        return shard(taught, batch.lengths(taught), group)

    def _teaches(self, batch: TrainBatch, i: int) -> bool:
        return bool(batch.advantages[i]) or self.reference is not None

    @torch.no_grad()
    def _look_at_untaught(self, batch: TrainBatch, tokens: TokenMetrics, group: ProcessGroup) -> None:
        """Else a step in which most groups are solved would say little about the policy, and one without a gradient
        nothing. A sample, as to compute all of them would make the update longer by up to a third."""
        untaught = [i for i in range(len(batch.response_ids)) if not self._teaches(batch, i)]
        sample = untaught[::_ONE_IN]
        count, drawn = (sum(len(batch.response_ids[i]) for i in some) for some in (untaught, sample))
        for micro in self._micro_batches(batch, shard(sample, batch.lengths(sample), group), group):
            logprobs, entropy = self._logprobs(self.model, micro)
            rollout = _rollout_logprobs(batch, micro, logprobs)
            tokens.add(batch, micro, logprobs, rollout, entropy, weight=count / drawn)

    def _plan(self, batch: TrainBatch, members: Sequence[int]) -> list[list[list[int]]]:
        return plan(batch.lengths(members), self.config.micro_batch_tokens, self.model.config.hidden_size)

    def _micro_batches(self, batch: TrainBatch, members: Sequence[int], group: ProcessGroup) -> Iterator[MicroBatch]:
        """Those of this member."""
        for rows in self._plan(batch, members):
            yield pack([[members[i] for i in row] for row in rows], batch.prompt_ids, batch.response_ids, self.device)
            done = sum(batch.lengths([members[i] for row in rows for i in row]))
            self.updated += done * self._token_share * (_BACK if torch.is_grad_enabled() else 1)

    def _share_of_a_token(self, batch: TrainBatch, shards: Sequence[Sequence[int]]) -> float:
        """Of the update's work, of a token that goes through the model without a gradient."""
        several = self.config.updates_per_step > 1
        return 1 / max(1, (_BACK + several) * sum(sum(batch.lengths(own)) for own in shards))

    def _logprobs(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(model, micro, self.rollout.temperature, self.config.logits_mb, self.autocast)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """[N, V] at each token of one sequence [N]."""
        return sequence_logits(self.model, tokens.to(self.model.device), self.autocast)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def sha256(self) -> str:
        return weights.sha256(self.state_dict())

    def save(self, folder: Path) -> None:
        """`policy/`, which transformers can load, and the optimizer's state as safetensors."""
        self.model.save_pretrained(folder / "policy")
        save_file(dict(self.optimizer_state()), folder / "optimizer.safetensors")

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """name of the parameter + name of the moment -> tensor; empty before the first update."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        return {
            f"{names[id(p)]}/{key}": value.detach().contiguous()
            for p, moments in self.optimizer.state.items()
            for key, value in moments.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for key, value in state.items():
            name, _, moment = key.rpartition("/")
            place = torch.device("cpu") if moment == "step" and not self.fused else self.device
            self.optimizer.state[parameters[name]][moment] = value.to(place, copy=True)

    def load_optimizer(self, folder: Path) -> None:
        self.load_optimizer_state(load_file(folder / "optimizer.safetensors"))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of step 0, 1, ..: `warmup_steps` of even rise, then the schedule, which is above 0 at the last step."""
    if step < config.warmup_steps or config.schedule == "constant":
        return config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))
    gone = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    return config.learning_rate * (1 - gone if config.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2)


def _load(folder: str | Path, dtype: torch.dtype, device: torch.device) -> Any:
    with telling(ModelError, f"{folder} cannot be loaded as a model to train"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, attn_implementation="sdpa", use_safetensors=True
        )
    model.to(device)
    model.eval()  # no dropout: old and new log-probs must come from the same function
    return model


def _checkpoint_layers(model: Any) -> None:
    newer = getattr(model, "activation_checkpointing_enable", None)  # the other name warns that it is going
    enable = newer or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # transformers checkpoints in training alone; the parts within stay without dropout


def _rollout_logprobs(batch: TrainBatch, micro: MicroBatch, like: Tensor) -> Tensor:
    return like.new_tensor([x for i in micro.sequences for x in batch.rollout_logprobs[i]])
