"""The policy: a model with its optimizer, and its update on a rollout."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt.config import RolloutConfig, TrainConfig
from tlt.models import weights
from tlt.models.hugging_face import checkpoint_layers, load_model, save_model
from tlt.rl.batching import MicroBatch
from tlt.rl.logprobs import FixedLogprobs, exchange, old_logprobs, penalized, rollout_logprobs, sequence_logits
from tlt.rl.losses import fixed_logprobs, has_gradient, needs_logprobs
from tlt.rl.measure import NotFinite, TokenMetrics, refuse_loss, refuse_weights
from tlt.rl.parallel import Alone, ProcessGroup, numbers_of, sum_gradients, take_gradients
from tlt.rl.passes import BACKWARD_PASSES, Passes, deterministic
from tlt.types import TrainBatch

log = logging.getLogger(__name__)

TOTALS = ("loss", "clipped", "kl", "weight")
"""names of weighted sums over the tokens of an optimizer step"""
_ONE_IN = 8  # token metrics include one in 8 of the responses without a gradient


class TrainedModel:
    """Hugging Face model with AdamW. Master weights are float32, or float64 if `dtype` is float64. If `dtype` is
    bfloat16, passes run under autocast.

    Memory per parameter: master weight, gradient and Adam's two moments, 4 x 4 bytes in float32.
    """

    fused = True  # whether AdamW uses torch's fused kernels
    home: torch.device | None = None  # device that models are loaded to (default: `device`)

    def __init__(
        self, folder: str | Path, dtype: torch.dtype, device: torch.device, config: TrainConfig, base: str | Path
    ) -> None:
        """Load the weights in `folder`. `base`: path of the model that training started from."""
        self.config, self.device, self.base = config, device, base
        self.autocast = dtype == torch.bfloat16
        self.model = self._load(folder, torch.float32 if self.autocast else dtype)
        if config.gradient_checkpointing:
            checkpoint_layers(self.model)
        self.optimizer = self._make_optimizer()
        refuse_weights(self.own_weights(), Alone(), f"in {folder}", "fetch or save the model again")
        self.version: int | None = 0
        """Number of training steps that the weights have had. None during an update once a weight has changed."""

    def _load(self, folder: str | Path, dtype: torch.dtype) -> Any:
        return load_model(folder, dtype, self.home or self.device)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        trained, config = trained_parameters(self.model), self.config
        decays = {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay}
        stays = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}  # norms and biases
        return torch.optim.AdamW(
            [group for group in (decays, stays) if group["params"]],
            lr=config.learning_rate,
            betas=(0.9, config.adam_beta2),
            fused=self.fused,
        )

    def own_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the weights by name. A sharded policy returns only this member's part of each weight."""
        return self.model.named_parameters()

    # -- one optimizer step --------------------------------------------------------------------------------------------

    def apply_gradients(self, group: ProcessGroup, taken: Sequence[Sequence[Tensor]], total: int) -> float:
        """Take an optimizer step with the sum of all shards' gradients, divided by `total` and clipped. Return the norm
        before clipping. If the norm is not finite, change no weight.

        The parameters hold the gradient of this member's last shard. `taken`: gradients of its other shards."""
        parameters = trained_parameters(self.model)
        for parameter in parameters:
            if parameter.grad is None:  # no response was computed; Adam's moments and weight decay still apply
                parameter.grad = torch.zeros_like(parameter)
        norm = self._clip(group, taken, total)
        if norm.isfinite():  # else the optimizer step would make weights NaN
            self.version = None
            self.optimizer.step()
            torch.autograd.graph.increment_version(parameters)  # a fused step does not, and `EngineForward` needs it
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _clip(self, group: ProcessGroup, taken: Sequence[Sequence[Tensor]], total: int) -> Tensor:
        """Sum the shards' gradients, divide them by `total` and clip their norm. Return the norm before clipping."""
        parameters = trained_parameters(self.model)
        gradients = [p.grad for p in parameters if p.grad is not None]
        sum_gradients(gradients, group, taken)
        for gradient in gradients:
            gradient.div_(total)
        return torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def trained_state(self) -> Mapping[str, Tensor]:
        """Return the tensors that training changes, by name. `load_state_dict` accepts them."""
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    def sha256(self) -> str:
        return weights.sha256(self.state_dict())

    def save(self, folder: Path) -> None:
        """Write `policy/`, which transformers can load, and the optimizer's state as safetensors."""
        self._save_model(folder / "policy")
        save_file(dict(self.optimizer_state()), folder / "optimizer.safetensors")

    def _save_model(self, folder: Path) -> None:
        save_model(self.model, folder)

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """Return Adam's state by name "parameter/moment". It is empty before the first update."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        return {
            f"{names[id(p)]}/{key}": value.detach().contiguous()
            for p, moments in self.optimizer.state.items()
            for key, value in moments.items()
        }

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace Adam's state by copies of `state` on the devices of the parameters."""
        parameters = dict(self.model.named_parameters())
        steps = self.device if self.fused else torch.device("cpu")
        self.optimizer.state.clear()
        for key, value in state.items():
            name, _, moment = key.rpartition("/")
            place = steps if moment == "step" else parameters[name].device
            self.optimizer.state[parameters[name]][moment] = value.to(place, copy=True)

    def load_optimizer(self, folder: Path) -> None:
        self.load_optimizer_state(load_file(folder / "optimizer.safetensors"))


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


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
        self._skipped_step: int | None = None  # last step in which no gradient was finite

    def update(self, batch: TrainBatch, step: int, group: ProcessGroup | None = None) -> dict[str, float]:
        """Take the optimizer steps of one rollout. Return the metrics of the update (docs/metrics.md). A batch without
        responses changes nothing. Raises NotFinite, GroupBroken.

        Every member of a process `group` passes the same whole batch, and has bitwise the same weights afterwards."""
        group, rate = group or Alone(), learning_rate(self.config, step)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = rate
        self.passes.progress.reset()
        metrics = Update(self, self.passes, batch, step, group).run()
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
class ShardSum:
    """Sums over the tokens of a shard."""

    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))
    wrong: str = ""
    """name of the first value that is not finite (the loss or a log-prob), or empty"""


@dataclass
class Update:
    """Optimizer steps on the responses of one rollout. The responses of each step are cut into one shard per worker of
    the recipe. Each member of `group` computes a range of shards."""

    trained: TrainedModel
    passes: Passes
    batch: TrainBatch
    step: int
    group: ProcessGroup

    def run(self) -> dict[str, float]:
        """Take all optimizer steps. Return the mean of each metric over them."""
        passes, config, fixed, metrics = self.passes, self.passes.config, self.compute_fixed(), dict[str, float]()
        if passes.reference and config.kl_in == "reward":
            self.batch, metrics["kl"] = penalized(self.batch, fixed, passes.objective.kl, config)
        mini_batches = split(len(self.batch.response_ids), config.updates_per_step)
        shards = [self._own_shards(self._counted(members, has_gradient)) for members in mini_batches]
        self._expect(chain(*shards), BACKWARD_PASSES * config.epochs, 1.0)
        # token metrics are those of the first epoch only, because each epoch changes the policy
        tokens = [TokenMetrics(passes.device) for _ in range(config.epochs)]
        self._sample_untaught(tokens[0])
        reports = [
            self._optimizer_step(members, own, fixed, seen)
            for seen in tokens
            for members, own in zip(mini_batches, shards, strict=True)
        ]
        names = ("loss", "clipped", "grad_norm", "skipped", *(["kl"] if passes.reference else []))
        means = {name: sum(report[name] for report in reports) / max(1, len(reports)) for name in names}
        return means | metrics | tokens[0].over(self.group)

    def _counted(self, members: Iterable[int], counts: Callable[[TrainBatch, int, TrainConfig], bool]) -> list[int]:
        return [i for i in members if counts(self.batch, i, self.passes.config)]

    def _own_shards(self, members: Sequence[int]) -> list[list[int]]:
        """Return this member's shards of the responses `members`. The shards depend only on the batch and the
        recipe."""
        shards = self.passes.packer.all_shards(self.batch, members, self.group.shards)
        return [shards[number] for number in numbers_of(self.group.rank, self.group.size, self.group.shards)]

    def _expect(self, shards: Iterable[Sequence[int]], passes: int, end: float) -> None:
        """Scale the progress so that it reaches `end` (0 to 1) when these shards are computed. `passes`: cost of each
        token, in forward passes."""
        self.passes.progress.expect(passes * sum(sum(self.batch.lengths(shard)) for shard in shards), end)

    @torch.no_grad()
    def compute_fixed(self) -> FixedLogprobs:
        """Compute the log-probs that stay fixed during the update. Each member computes those of its shards. Return the
        log-probs of all members, and those of responses kept from an earlier step."""
        passes, batch, group, carried = self.passes, self.batch, self.group, self.passes.carried(self.batch)
        models = {"old": passes.model, "reference": passes.reference}
        models = {name: models[name] for name in fixed_logprobs(passes.config)}
        if not models:
            return FixedLogprobs(carried, {})
        counted = self._counted(range(len(batch.response_ids)), needs_logprobs)
        shards, own = self._own_shards(counted), {name: dict[int, Tensor]() for name in models}
        self._expect(shards, len(models), len(models) / (len(models) + BACKWARD_PASSES * passes.config.epochs))
        for shard in shards:
            for micro in passes.micro_batches([*models.values()], batch, shard, group):
                lengths = [batch.num_sampled(i) for i in micro.sequences]
                for name, model in models.items():
                    logprobs, _ = passes.logprobs(model, micro)
                    own[name] |= zip(micro.sequences, logprobs.split(lengths), strict=True)
        lengths, like = {i: batch.num_sampled(i) for i in counted}, passes.widened([])
        found = {name: exchange(some, lengths, group, like) for name, some in own.items()}
        return FixedLogprobs(found.get("old", {}) | carried, found.get("reference", {}))

    def _optimizer_step(
        self, members: range, shards: Sequence[list[int]], fixed: FixedLogprobs, tokens: TokenMetrics
    ) -> dict[str, float]:
        """Take one optimizer step on a mini-batch, and return its metrics. `members`: its response indices. `shards`:
        this member's shards of them. The metrics of their tokens are added to `tokens`."""
        passes, sums, taken = self.passes, [ShardSum() for _ in shards], list[list[Tensor]]()
        self.trained.optimizer.zero_grad(set_to_none=True)  # an interrupted update leaves gradients
        for shard, sum_ in zip(shards, sums, strict=True):
            if sum_ is not sums[0]:
                taken.append(take_gradients(trained_parameters(passes.model)))
            for micro in passes.micro_batches([passes.model], self.batch, shard, self.group):
                self.add_gradient(micro, fixed, sum_, tokens)
        own = torch.tensor([[*one.totals.values()] for one in sums], dtype=torch.float64, device=passes.device)
        totals = dict(zip(TOTALS, self.group.sum_shards(own).tolist(), strict=True))
        refuse_loss(totals["loss"], next((one.wrong for one in sums if one.wrong), ""), self.step)
        total = passes.objective.total(self.batch, members)
        norm = self.trained.apply_gradients(self.group, taken, total)
        means = {name: totals[name] / (totals["weight"] or 1.0) for name in ("clipped", "kl")}
        return {"loss": totals["loss"] / total, **means, "grad_norm": norm, "skipped": float(not math.isfinite(norm))}

    def add_gradient(self, micro: MicroBatch, fixed: FixedLogprobs, to: ShardSum, tokens: TokenMetrics) -> None:
        """Add the gradient of a micro-batch to the parameters, and its metrics to `to` and `tokens`."""
        passes, batch = self.passes, self.batch
        logprobs, entropy = passes.logprobs(passes.model, micro)
        inputs = passes.objective.inputs(batch, micro, logprobs, fixed.old)
        kl_in_loss = passes.objective.kl_in_loss
        reference = torch.cat([fixed.reference[i] for i in micro.sequences]) if kl_in_loss else None
        loss, found = passes.objective.on(inputs, reference)
        with deterministic(passes.config.deterministic and passes.device.type == "cuda"):  # CPUs have a fixed order
            loss.backward()
        for name, value in found.items():
            to.totals[name] += value
        tokens.add(inputs.old_logprobs, rollout_logprobs(batch, micro, logprobs), entropy)
        if not to.wrong and not math.isfinite(to.totals["loss"]):
            to.wrong = "the loss" if logprobs.isfinite().all() else "a log-prob of the policy"

    @torch.no_grad()
    def _sample_untaught(self, tokens: TokenMetrics) -> None:
        """Add one in 8 of the responses without a gradient to `tokens`, so that token metrics cover the whole batch.

        Computing all of them would make the update up to a third longer."""
        passes, batch = self.passes, self.batch
        untaught = [i for i in range(len(batch.response_ids)) if not has_gradient(batch, i, passes.config)]
        sample = untaught[::_ONE_IN]
        count, drawn = (sum(map(batch.num_sampled, some)) for some in (untaught, sample))
        carried = passes.carried(batch)
        for shard in self._own_shards(sample):
            for micro in passes.micro_batches([passes.model], batch, shard, self.group):
                logprobs, entropy = passes.logprobs(passes.model, micro)
                old = old_logprobs(batch, micro, logprobs, carried)
                tokens.add(old, rollout_logprobs(batch, micro, logprobs), entropy, weight=count / drawn)
