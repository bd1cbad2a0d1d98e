"""The policy that is trained: a Hugging Face model, its optimizer, and one update on a rollout."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt.config import RolloutConfig, TrainConfig
from tlt.models import weights
from tlt.models.hugging_face import checkpoint_layers, load_model, save_model
from tlt.rl.batching import MicroBatch
from tlt.rl.early import fixed_logprobs, has_early_gradients, has_gradient, needs_logprobs
from tlt.rl.finite import NotFinite, refuse_loss, refuse_weights
from tlt.rl.fixed import Fixed, exchange, penalized
from tlt.rl.logprobs import old_logprobs, rollout_logprobs, sequence_logits, token_logprobs
from tlt.rl.objective import Objective
from tlt.rl.optimizer import adamw, load_moments, moments_of
from tlt.rl.packer import Packer
from tlt.rl.parallel import Alone, Owners, ProcessGroup, sum_gradients
from tlt.rl.planner import Held, Planner
from tlt.rl.schedule import learning_rate, split
from tlt.rl.shard_sum import TOTALS, Plan, Shard, ShardSum, ShardSums
from tlt.rl.shared_prefix import share_prefixes
from tlt.rl.token_metrics import TokenMetrics
from tlt.types import TrainBatch

log = logging.getLogger(__name__)

_BACK = 3  # passes that one with its gradient takes as long as
_ONE_IN = 8  # of the responses that have no gradient, one in so many is measured


class Policy:
    """Trained model with its optimizer. Master weights are float32, or float64 if `dtype` is. With bfloat16 the passes
    run under autocast.

    Memory per parameter: master weight, gradient and Adam's two moments, 4 x 4 bytes in float32. If `kl_weight` is set,
    the frozen `reference`, the model that training started from, adds 4 bytes.
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
        self.base = reference or folder
        self.model = self._load(folder, masters)
        if config.gradient_checkpointing:
            checkpoint_layers(self.model)
        self.reference = load_model(reference or folder, masters, self._home()) if config.kl_weight else None
        self.objective = Objective(config, rollout)
        self.optimizer = self._make_optimizer()
        refuse_weights(self._own_weights(), Alone(), f"in {folder}", "fetch or save the model again")
        shares = all(share_prefixes(model) for model in (self.model, self.reference) if model)
        self.packer = Packer(config.micro_batch_tokens, self.model.config.hidden_size, device, shares)
        self.planner = Planner(config, rollout.prompts_per_step, self.packer)
        self.sums = ShardSums(lambda: self._trained, self._begin, self._backward)
        self.logprob_sums = ShardSums(lambda: [], self._begin_logprobs, self._add_logprobs)
        self.early = self.sums if has_early_gradients(config) else self.logprob_sums
        self._skipped = 0  # updates in a row that were left out as a whole
        self.version: int | None = 0
        """number of steps of training; None during an update once a weight has changed"""
        self.updated, self._token_share = 0.0, 0.0
        """share of the current update that is done, which other threads may read (0 before and after it); and the
        share of one token's forward pass"""

    def _load(self, folder: str | Path, dtype: torch.dtype) -> Any:
        return load_model(folder, dtype, self._home())

    def _home(self) -> torch.device:
        """Return the device that models are loaded to."""
        return self.device

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return adamw(self.model, self.config, self.fused)

    # -- update -------------------------------------------------------------------------------------------------------

    def update(
        self,
        batch: TrainBatch,
        step: int,
        group: ProcessGroup | None = None,
        held: Held = (),
    ) -> dict[str, float]:
        """Do the optimizer steps of one rollout and return scalar metrics. Micro-batches depend on prompt order alone.

        All members of a `group` have the same policy and pass the same whole batch. Each computes its shards of every
        optimizer step, and all end with the same bits. `held`: early shards that each member has begun, with the share
        that is done. A response without a gradient has an advantage of 0 and no KL term, for example if all rewards of
        its group are equal. One in eight of these goes through the model once, for `entropy` and the mismatch over all
        tokens of the batch. A batch without responses changes nothing, and its metrics are 0. `skipped`: share of
        optimizer steps that were left out because their gradient was not finite. `early`: share of the tokens whose
        gradient, or else log-probs, were computed before the update. Raises NotFinite, GroupBroken.
        """
        group = group or Alone()
        rate = learning_rate(self.config, step)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = rate
        self.updated = 0.0
        fixed, before = None, dict[str, float]()
        if fixed_logprobs(self.config):
            fixed, before["early"] = self._fixed(batch, group, held)
            if self.reference and self.config.kl_in == "reward":
                batch, before["kl"] = penalized(batch, fixed, self.objective.kl, self.config)
        mini_batches = split(len(batch.response_ids), self.config.updates_per_step)
        plans = [self.planner.of_gradients(batch, members, group, held) for members in mini_batches]
        self._expect(plans, _BACK * self.config.epochs, 1.0)
        # later epochs look at what the first one has moved
        tokens = [TokenMetrics(self.device) for _ in range(self.config.epochs)]
        self._look_at_untaught(batch, tokens[0], group)
        reports = [
            self._optimizer_step(batch, members, plan, fixed, seen, step, group)
            for seen in tokens
            for members, plan in zip(mini_batches, plans, strict=True)
        ]
        names = ("loss", "clipped", "grad_norm", "skipped", "early", *(["kl"] if self.reference else []))
        metrics = {name: sum(r[name] for r in reports) / max(1, len(reports)) for name in names}
        metrics |= before | tokens[0].over(group)
        refuse_weights(self._own_weights(), group, f"after step {step + 1}")
        self._refuse_to_stand_still(metrics["skipped"] == 1.0, step)
        self.version, self.updated, self._token_share = step + 1, 0.0, 0.0
        return metrics | {"learning_rate": rate}

    def early_update(self, number: int, batch: TrainBatch, stop: Callable[[], bool]) -> float:
        """Compute the gradient or the log-probs of an early shard, or continue with it, until `stop` returns True after
        a micro-batch. Return the share that is done. The next update uses it."""
        with torch.set_grad_enabled(self.early is self.sums):
            return self.early.go_on(self.planner.early_shard(number, batch), stop)

    @torch.no_grad()
    def _fixed(self, batch: TrainBatch, group: ProcessGroup, held: Held) -> tuple[Fixed, float]:
        """Compute the log-probs that stay fixed during the update, each member those of its shards. Return all of them,
        and the share of tokens whose log-probs were computed early."""
        models, plan = self._fixed_models, self.planner.of_logprobs(batch, group, held)
        self._expect([plan], len(models), len(models) / (len(models) + _BACK * self.config.epochs))
        found = self.logprob_sums.over(plan, lambda shard: self._begin_logprobs(shard, group))
        counted = [i for i in range(len(batch.response_ids)) if needs_logprobs(batch, i, self.config)]
        lengths, like = {i: batch.num_sampled(i) for i in counted}, torch.zeros(0, dtype=self._wide, device=self.device)
        fixed = Fixed({}, {})
        for name in models:
            own = {plan.in_batch(one.shard, i): x for one in found for i, x in getattr(one.fixed, name).items()}
            getattr(fixed, name).update(exchange(own, lengths, group, like))
        fixed.old.update(self._carried(batch))
        sums = self._summed(found, plan, group)
        return fixed, sums["early"] / (sums["tokens"] or 1.0)

    def _summed(self, found: Sequence[ShardSum], plan: Plan, group: ProcessGroup) -> dict[str, float]:
        """Return the totals of all members."""
        own = torch.tensor([list(one.totals.values()) for one in found], dtype=torch.float64, device=self.device)
        return dict(zip(TOTALS, group.sum_shards(own, plan.owners).tolist(), strict=True))

    def _carried(self, batch: TrainBatch) -> dict[int, Tensor]:
        """Return the log-probs of responses that an older policy decoded."""
        return {
            i: torch.tensor(of_one, dtype=self._wide, device=self.device) for i, of_one in batch.old_logprobs.items()
        }

    @property
    def _wide(self) -> torch.dtype:
        """Type of log-probs, which are never bfloat16."""
        return torch.float64 if self.model.dtype == torch.float64 else torch.float32

    def _optimizer_step(
        self,
        batch: TrainBatch,
        members: range,
        plan: Plan,
        fixed: Fixed | None,
        tokens: TokenMetrics,
        step: int,
        group: ProcessGroup,
    ) -> dict[str, float]:
        found = self.sums.over(plan, lambda shard: self._begin(shard, fixed, group))
        for one in found:
            tokens.add_all(one.tokens)
        sums = self._summed(found, plan, group)
        refuse_loss(sums["loss"], next((one.wrong for one in found if one.wrong), ""), step)
        total = self.objective.total(batch, members)
        norm, skipped = self._step(group, [one.gradients for one in found], plan.owners, total)
        means = {name: sums[name] / (sums["weight"] or 1.0) for name in ("clipped", "kl")}
        early = sums["early"] / (sums["tokens"] or 1.0)
        return {"loss": sums["loss"] / total, **means, "early": early, "grad_norm": norm, "skipped": float(skipped)}

    def _begin(self, shard: Shard, fixed: Fixed | None = None, group: ProcessGroup | None = None) -> ShardSum:
        return self._empty_sum([self.model], shard, fixed or Fixed(self._carried(shard.batch), {}), group)

    def _begin_logprobs(self, shard: Shard, group: ProcessGroup | None = None) -> ShardSum:
        return self._empty_sum([*self._fixed_models.values()], shard, Fixed({}, {}), group)

    def _empty_sum(self, models: Sequence[Any], shard: Shard, fixed: Fixed, group: ProcessGroup | None) -> ShardSum:
        micro_batches = self._micro_batches(models, shard.batch, shard.members, group or Alone())
        return ShardSum(shard, fixed, micro_batches, TokenMetrics(self.device))

    @property
    def _fixed_models(self) -> dict[str, Any]:
        models = {"old": self.model, "reference": self.reference}
        return {name: models[name] for name in fixed_logprobs(self.config)}

    def _backward(self, to: ShardSum, micro: MicroBatch) -> None:
        """Add one micro-batch to the gradients, the totals and the token metrics."""
        batch = to.shard.batch
        logprobs, entropy = self._logprobs(self.model, micro)
        inputs = self.objective.inputs(batch, micro, logprobs, to.fixed.old)
        reference = self._reference_logprobs(to.fixed, micro) if self.objective.kl_in_loss else None
        loss, found = self.objective.on(inputs, reference)
        loss.backward()
        for name, value in found.items():
            to.totals[name] += value
        to.tokens.add(inputs.old_logprobs, rollout_logprobs(batch, micro, logprobs), entropy)
        if not to.wrong and not math.isfinite(to.totals["loss"]):
            to.wrong = "the loss" if logprobs.isfinite().all() else "a log-prob of the policy"

    def _add_logprobs(self, to: ShardSum, micro: MicroBatch) -> None:
        """Add one micro-batch's log-probs."""
        lengths = [to.shard.batch.num_sampled(i) for i in micro.sequences]
        to.totals["tokens"] += sum(lengths)
        for name, model in self._fixed_models.items():
            logprobs, _ = self._logprobs(model, micro)
            getattr(to.fixed, name).update(zip(micro.sequences, logprobs.split(lengths), strict=True))

    @torch.no_grad()
    def _reference_logprobs(self, fixed: Fixed, micro: MicroBatch) -> Tensor:
        if fixed.reference:
            return torch.cat([fixed.reference[i] for i in micro.sequences])
        return self._logprobs(self.reference, micro)[0]

    @property
    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _step(
        self, group: ProcessGroup, shards: Sequence[list[Tensor] | None], owners: Owners, total: int
    ) -> tuple[float, bool]:
        """Apply the sum of all shards' gradients, divided by `total`. Return its norm, and whether it was skipped."""
        parameters = self._trained
        for parameter in parameters:
            if parameter.grad is None:  # of a shard without responses; and Adam's moments fade in a step without any
                parameter.grad = torch.zeros_like(parameter)
        own = [shard or [p.grad for p in parameters if p.grad is not None] for shard in shards]
        norm = self._clip(parameters, group, own, owners, total)
        skipped = not norm.isfinite()  # one step with it would spoil every weight for good
        if not skipped:
            self.version = None
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm), skipped

    def _own_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return this member's part of each weight, by name."""
        return self.model.named_parameters()

    def _refuse_to_stand_still(self, skipped: bool, step: int) -> None:
        """Log a warning for one update without a finite gradient, and raise NotFinite for two in a row."""
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped == 1:
            log.warning("no gradient of step %d is finite: it changed nothing, and a second one ends the run", step + 1)
        if self._skipped > 1:
            raise NotFinite(f"no gradient of steps {step} and {step + 1} is finite: lower train.learning_rate")

    def _clip(
        self,
        parameters: list[torch.nn.Parameter],
        group: ProcessGroup,
        shards: Sequence[Sequence[Tensor]],
        owners: Owners,
        total: int,
    ) -> Tensor:
        """Sum the shards' gradients, divide them by `total` and clip them. Return their norm before clipping."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        sum_gradients(gradients, group, shards, owners)
        for gradient in gradients:
            gradient.div_(total)
        return torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch, group: ProcessGroup | None = None) -> list[list[float]]:
        """Return the log-probs of each response's tokens, under the current policy."""
        members, found = range(len(batch.response_ids)), dict[int, list[float]]()
        for micro in self._micro_batches([self.model], batch, members, group or Alone()):
            logprobs, _ = self._logprobs(self.model, micro)
            lengths = [batch.num_sampled(i) for i in micro.sequences]
            found |= zip(micro.sequences, (of_one.tolist() for of_one in logprobs.split(lengths)), strict=True)
        return [found[i] for i in members]

    @torch.no_grad()
    def _look_at_untaught(self, batch: TrainBatch, tokens: TokenMetrics, group: ProcessGroup) -> None:
        """Add a sample of the responses without a gradient to `tokens`, so that its metrics cover the whole batch.

        To compute all of them would make the update longer by up to a third."""
        untaught = [i for i in range(len(batch.response_ids)) if not has_gradient(batch, i, self.config)]
        sample = untaught[::_ONE_IN]
        count, drawn = (sum(map(batch.num_sampled, some)) for some in (untaught, sample))
        shards = self.packer.shards(batch, sample, group)
        carried = self._carried(batch)
        for shard in shards:
            for micro in self._micro_batches([self.model], batch, shard, group):
                logprobs, entropy = self._logprobs(self.model, micro)
                old = old_logprobs(batch, micro, logprobs, carried)
                tokens.add(old, rollout_logprobs(batch, micro, logprobs), entropy, weight=count / drawn)

    def _micro_batches(
        self, models: Sequence[Any], batch: TrainBatch, members: Sequence[int], group: ProcessGroup
    ) -> Iterator[MicroBatch]:
        """Yield this member's micro-batches, each for a pass through all `models`."""
        for layout in self.packer.plan(batch, members):
            yield self.packer.pack(batch, layout)
            done = sum(batch.lengths([i for row in layout.rows for i in row]))
            self.updated += done * self._token_share * (_BACK if torch.is_grad_enabled() else len(models))

    def _expect(self, plans: Sequence[Plan], passes: int, end: float) -> None:
        """Let `updated` grow to `end` with the shards of these plans. `passes`: forward passes of each token."""
        left = [shard for plan in plans for shard in plan.own if shard.number not in self.early.early]
        tokens = passes * sum(sum(shard.batch.lengths(shard.members)) for shard in left)
        self._token_share = (end - self.updated) / max(1, tokens)

    def _logprobs(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(model, micro, self.rollout.temperature, self.config.logits_mb, self.autocast)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [N, V] at each token of one sequence [N]."""
        return sequence_logits(self.model, tokens.to(self.model.device), self.autocast)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def trained_state(self) -> Mapping[str, Tensor]:
        """Return the tensors that training changes, for `load_state_dict`."""
        return self.state_dict()

    def sha256(self) -> str:
        return weights.sha256(self.state_dict())

    def save(self, folder: Path) -> None:
        """Write `policy/`, which transformers can load, and the optimizer's state as safetensors."""
        self._save_model(folder / "policy")
        save_file(dict(self.optimizer_state()), folder / "optimizer.safetensors")

    def _save_model(self, folder: Path) -> None:
        save_model(self.model, folder)

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """Return "parameter/moment" -> tensor. It is empty before the first update."""
        return moments_of(self.optimizer, self.model)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        load_moments(self.optimizer, self.model, state, torch.device("cpu") if not self.fused else self.device)

    def load_optimizer(self, folder: Path) -> None:
        self.load_optimizer_state(load_file(folder / "optimizer.safetensors"))
