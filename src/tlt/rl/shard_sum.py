"""Gradients or log-probs of the shards of an update, and sums of their metrics. A shard may be unfinished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.rl.batching import MicroBatch
from tlt.rl.logprobs import FixedLogprobs
from tlt.rl.measure import TokenMetrics
from tlt.rl.parallel import Owners, take_gradients
from tlt.types import TrainBatch

TOTALS = ("loss", "clipped", "kl", "weight", "tokens", "early")
"""Names of sums over the tokens of an optimizer step. The first four are weighted. "early" is the number of tokens
computed before the update."""


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


class ShardSums:
    """`ShardSum` objects of one worker. The parameters hold the gradient of one shard at a time. During a rollout, that
    is the unfinished early shard, if there is one.

    `trained` returns the parameters, or [] if no gradients are computed. `begin` returns an empty sum. `add` computes a
    micro-batch, and adds its results to a sum and its gradient to the parameters."""

    def __init__(
        self,
        trained: Callable[[], Sequence[torch.nn.Parameter]],
        begin: Callable[[Shard], ShardSum],
        add: Callable[[ShardSum, MicroBatch], None],
    ) -> None:
        self.trained, self.begin, self.add = trained, begin, add
        self.early: dict[int, ShardSum] = {}

    def continue_shard(self, shard: Shard, stop: Callable[[], bool]) -> float:
        """Begin or continue the computation of an early shard, until `stop` returns True after a micro-batch. Return
        the share that is done. If the shard is new, any other unfinished shard is dropped."""
        known = self._known(shard)
        if known is None:
            self._empty_parameters()
            self.early = {number: one for number, one in self.early.items() if one.is_complete}
            known = self.early[shard.number] = self.begin(shard)
        self._accumulate(known, stop)
        if (known.is_complete or known.share_done == 1.0) and not known.gradients:
            known.is_complete, known.gradients = True, take_gradients(self.trained())
        return known.share_done

    def over(self, plan: Plan, begin: Callable[[Shard], ShardSum]) -> list[ShardSum]:
        """Compute all shards of this worker in `plan`, and return their sums. Results of early shards are reused, and
        then dropped. At the end the parameters hold the gradient of at most one shard."""
        found: dict[int, ShardSum] = {}
        for shard in plan.own:
            known = self._known(shard) if shard.number < len(plan.early) else None
            if known:
                known.count_as_early()
            found[shard.number] = known or begin(shard)
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
        for micro in to.micro_batches:
            self.add(to, micro)
            if stop():
                return
        to.is_complete = True

    def _empty_parameters(self) -> None:
        for parameter in self.trained():
            parameter.grad = None
