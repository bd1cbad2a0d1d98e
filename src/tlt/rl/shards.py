"""Shards of an update: parts of its batch, each computed by one worker, early or in the update.

A shard's result is a gradient (`GradientShards`) or log-probs that stay fixed during the update (`LogprobShards`). A
result may be unfinished.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt.rl.batching import MicroBatch
from tlt.rl.early import (
    Counts,
    counts_early,
    cut,
    fixed_logprobs,
    has_early_shards,
    has_gradient,
    needs_logprobs,
    owners_of,
)
from tlt.rl.logprobs import FixedLogprobs, rollout_logprobs
from tlt.rl.measure import TokenMetrics
from tlt.rl.parallel import Owners, ProcessGroup, take_gradients
from tlt.rl.passes import Passes, deterministic
from tlt.rl.trained_model import trained_parameters
from tlt.types import TrainBatch

TOTALS = ("loss", "clipped", "kl", "weight", "tokens", "early")
"""Names of sums over the tokens of an optimizer step. The first four are weighted. "early" is the number of tokens
computed before the update."""

Held = Sequence[Mapping[int, float]]
"""Early shards that each member has begun, as [member] -> {shard index: fraction that is done}."""


class Shard(NamedTuple):
    """Part of a batch: responses whose gradients or log-probs one worker computes."""

    number: int
    batch: TrainBatch
    members: list[int]
    """indices in `batch` of the responses to compute"""


class Plan(NamedTuple):
    """Shards of an optimizer step, or of the log-probs that are computed before the first optimizer step."""

    owners: Owners
    own: Sequence[Shard]
    """this member's shards, in the order of its shard indices in `owners`"""
    early: Sequence[Sequence[int]]
    """indices of the responses of each early shard; early shards come first, and each has a batch of its own"""

    def in_batch(self, shard: Shard, i: int) -> int:
        """Return the index in the whole batch of the response that has index `i` in `shard.batch`. They differ only for
        an early shard, which has a batch of its own."""
        return self.early[shard.number][i] if shard.number < len(self.early) else i


@dataclass
class ShardSum:
    """Gradients or log-probs of one shard, and sums of its metrics. The parameters hold the gradients until these are
    copied to `gradients`."""

    shard: Shard
    fixed: FixedLogprobs
    """fixed log-probs: those that the gradient needs, or those that are computed for this shard"""
    micro_batches: Iterator[MicroBatch]
    """micro-batches of the shard that are not computed yet"""
    tokens: TokenMetrics
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))
    wrong: str = ""
    """name of the first value that is not finite (the loss or a log-prob), or empty"""
    is_complete: bool = False
    gradients: list[Tensor] | None = None
    """gradients in host memory; None if the parameters hold them"""

    @property
    def share_done(self) -> float:
        """Share of the shard's tokens that went through the model."""
        whole = sum(map(self.shard.batch.num_sampled, self.shard.members))
        return self.totals["tokens"] / whole if whole else 1.0

    def count_as_early(self) -> None:
        """Count all tokens computed so far as computed before the update."""
        self.totals["early"] = self.totals["tokens"]


class Shards(ABC):
    """Shards of one kind: their plan, and this worker's results. The parameters hold the gradient of one shard at a
    time. During a rollout, that is the unfinished early shard, if there is one."""

    counts: Counts
    """function that selects the responses to compute"""
    with_gradients = False
    """whether passes are computed with gradients"""

    def __init__(self, passes: Passes, prompts: int) -> None:
        """`prompts`: number of prompts in a step."""
        self.passes, self.train, self.prompts = passes, passes.config, prompts
        self.early: dict[int, ShardSum] = {}

    @property
    @abstractmethod
    def models(self) -> dict[str, Any]:
        """Models that each micro-batch goes through, by the name of their log-probs."""

    @abstractmethod
    def add(self, to: ShardSum, micro: MicroBatch) -> None:
        """Compute a micro-batch. Add its results to a sum, and its gradient to the parameters."""

    def known_logprobs(self, shard: Shard) -> FixedLogprobs:
        """Return the fixed log-probs that are known before a shard is computed."""
        return FixedLogprobs({}, {})

    def trained(self) -> list[torch.nn.Parameter]:
        """Return the parameters that get gradients."""
        return []

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, batch: TrainBatch, members: Sequence[int], group: ProcessGroup, held: Held) -> Plan:
        """Return the shards of the responses `members`, early ones first. They depend only on the batch and the recipe.
        Their owners also depend on which early shards each member has begun."""
        early, late = [], [i for i in members if self.counts(batch, i, self.train)]
        if self.counts is counts_early(self.train) and has_early_shards(self.train, group.shards):
            early, late = cut(batch, set(late).__contains__, self.prompts, group.shards)
        shards = [self.early_shard(k, batch.part(own)) for k, own in enumerate(early)]
        others = self.passes.packer.all_shards(batch, late, group.shards)
        shards += [Shard(k, batch, own) for k, own in enumerate(others, len(early))]
        work = [self.passes.packer.work(shard.batch, shard.members) for shard in shards]
        begun = [{k: share for k, share in own.items() if k < len(early)} for own in held]
        owners = owners_of(work, begun or [{}] * group.size)
        return Plan(owners, [shards[k] for k in owners[group.rank]], early)

    def early_shard(self, number: int, batch: TrainBatch) -> Shard:
        """Return early shard `number`. `batch` has all responses of the shard's groups."""
        return Shard(number, batch, [i for i in range(len(batch.response_ids)) if self.counts(batch, i, self.train)])

    def expect(self, plans: Sequence[Plan], passes: int, end: float) -> None:
        """Scale the progress so that it reaches `end` (0 to 1) when this member has computed its shards of these plans.
        Shards that were begun early do not count. `passes`: cost of each token, in forward passes."""
        left = [shard for plan in plans for shard in plan.own if shard.number not in self.early]
        self.passes.progress.expect(passes * sum(sum(shard.batch.lengths(shard.members)) for shard in left), end)

    # -- results -------------------------------------------------------------------------------------------------------

    def continue_early(self, number: int, batch: TrainBatch, stop: Callable[[], bool]) -> float:
        """Begin or continue the computation of an early shard, until `stop` returns True after a micro-batch. Return
        the share that is done. If the shard is new, any other unfinished shard is dropped."""
        shard = self.early_shard(number, batch)
        known = self._known(shard)
        if known is None:
            self._empty_parameters()
            self.early = {number: one for number, one in self.early.items() if one.is_complete}
            known = self.early[number] = self.begin(shard)
        self._accumulate(known, stop)
        if (known.is_complete or known.share_done == 1.0) and not known.gradients:
            known.is_complete, known.gradients = True, take_gradients(self.trained())
        return known.share_done

    def compute(self, plan: Plan, fixed: FixedLogprobs | None, group: ProcessGroup) -> list[ShardSum]:
        """Compute all shards of this worker in `plan`, and return their sums. Results of early shards are reused, and
        then dropped. At the end the parameters hold the gradient of at most one shard."""
        found: dict[int, ShardSum] = {}
        for shard in plan.own:
            known = self._known(shard) if shard.number < len(plan.early) else None
            if known:
                known.count_as_early()
            found[shard.number] = known or self.begin(shard, fixed, group)
        left = [one for one in found.values() if not one.is_complete]
        left.sort(key=lambda one: one is not self.early.get(one.shard.number))  # the unfinished early shard first
        if not left or left[0] is not self.early.get(left[0].shard.number):
            self._empty_parameters()
        self.early = {}
        for place, one in enumerate(left):
            if place:
                left[place - 1].gradients = take_gradients(self.trained())
            self._accumulate(one, lambda: False)
        return list(found.values())

    def begin(self, shard: Shard, fixed: FixedLogprobs | None = None, group: ProcessGroup | None = None) -> ShardSum:
        """Return an empty sum. `fixed`: fixed log-probs (default: those that are known)."""
        micro_batches = self.passes.micro_batches([*self.models.values()], shard.batch, shard.members, group)
        return ShardSum(shard, fixed or self.known_logprobs(shard), micro_batches, TokenMetrics(self.passes.device))

    def forget(self) -> None:
        """Drop the results of all early shards. They are invalid once the weights have changed."""
        self.early = {}
        self._empty_parameters()

    def _known(self, shard: Shard) -> ShardSum | None:
        """Return the `ShardSum` that this worker began for this shard during the rollout. Return None if there is
        none, or if the shard had other responses then."""
        known = self.early.get(shard.number)
        return known if known and known.shard == shard else None

    def _accumulate(self, to: ShardSum, stop: Callable[[], bool]) -> None:
        with torch.set_grad_enabled(self.with_gradients):
            for micro in to.micro_batches:
                self.add(to, micro)
                if stop():
                    return
        to.is_complete = True

    def _empty_parameters(self) -> None:
        for parameter in self.trained():
            parameter.grad = None


class GradientShards(Shards):
    """Shards whose results are gradients of the objective."""

    counts = staticmethod(has_gradient)
    with_gradients = True

    def trained(self) -> list[torch.nn.Parameter]:
        return trained_parameters(self.passes.model)

    @property
    def models(self) -> dict[str, Any]:
        return {"policy": self.passes.model}

    def known_logprobs(self, shard: Shard) -> FixedLogprobs:
        return FixedLogprobs(self.passes.carried(shard.batch), {})

    def add(self, to: ShardSum, micro: MicroBatch) -> None:
        passes, batch = self.passes, to.shard.batch
        logprobs, entropy = passes.logprobs(passes.model, micro)
        inputs = passes.objective.inputs(batch, micro, logprobs, to.fixed.old)
        reference = self._reference_logprobs(to.fixed, micro) if passes.objective.kl_in_loss else None
        loss, found = passes.objective.on(inputs, reference)
        with deterministic(self.train.deterministic and passes.device.type == "cuda"):  # CPUs have a fixed order
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
        return self.passes.logprobs(self.passes.reference, micro)[0]


class LogprobShards(Shards):
    """Shards whose results are log-probs that stay fixed during an update."""

    counts = staticmethod(needs_logprobs)

    @property
    def models(self) -> dict[str, Any]:
        """Models whose log-probs stay fixed, by field of `FixedLogprobs`."""
        models = {"old": self.passes.model, "reference": self.passes.reference}
        return {name: models[name] for name in fixed_logprobs(self.train)}

    def early_shard(self, number: int, batch: TrainBatch) -> Shard:
        shard = super().early_shard(number, batch)
        return shard._replace(batch=replace(batch, advantages=[]))  # which may depend on groups that are not known yet

    def add(self, to: ShardSum, micro: MicroBatch) -> None:
        lengths = [to.shard.batch.num_sampled(i) for i in micro.sequences]
        to.totals["tokens"] += sum(lengths)
        for name, model in self.models.items():
            logprobs, _ = self.passes.logprobs(model, micro)
            getattr(to.fixed, name).update(zip(micro.sequences, logprobs.split(lengths), strict=True))
