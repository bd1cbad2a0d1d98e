"""Planner that cuts a batch into shards, early ones first, for an optimizer step or for log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tlt.config import TrainConfig
from tlt.rl.early import Counts, counts_early, cut, has_early_shards, has_gradient, needs_logprobs, owners_of
from tlt.rl.packer import Packer
from tlt.rl.parallel import ProcessGroup
from tlt.rl.shard_sum import Plan, Shard
from tlt.types import TrainBatch

Held = Sequence[Mapping[int, float]]
"""Early shards that each member has begun, as [member] -> {shard index: fraction that is done}."""


@dataclass
class Planner:
    """Planner of shards. The shards depend only on the batch and these settings. Their owners also depend on which
    early shards each member has begun."""

    train: TrainConfig
    prompts: int
    """number of prompts in a step"""
    packer: Packer

    def of_gradients(self, batch: TrainBatch, members: Sequence[int], group: ProcessGroup, held: Held) -> Plan:
        """Return shards of those responses of an optimizer step (indices `members`) that have a gradient."""
        return self._plan(batch, members, has_gradient, group, held)

    def of_logprobs(self, batch: TrainBatch, group: ProcessGroup, held: Held) -> Plan:
        """Return shards of the responses whose log-probs are computed before the first gradient."""
        return self._plan(batch, range(len(batch.response_ids)), needs_logprobs, group, held)

    def early_shard(self, number: int, batch: TrainBatch) -> Shard:
        """Return early shard `number`. `batch` has all responses of the shard's groups."""
        counts = counts_early(self.train)
        members = [i for i in range(len(batch.response_ids)) if counts(batch, i, self.train)]
        if counts is needs_logprobs:
            batch = replace(batch, advantages=[])  # advantages may depend on groups that are not known yet
        return Shard(number, batch, members)

    def _plan(self, batch: TrainBatch, members: Sequence[int], counts: Counts, group: ProcessGroup, held: Held) -> Plan:
        early, late = [], [i for i in members if counts(batch, i, self.train)]
        if counts is counts_early(self.train) and has_early_shards(self.train, group.shards):
            early, late = cut(batch, set(late).__contains__, self.prompts, group.shards)
        shards = [self.early_shard(k, batch.part(own)) for k, own in enumerate(early)]
        others = self.packer.all_shards(batch, late, group.shards)
        shards += [Shard(k, batch, own) for k, own in enumerate(others, len(early))]
        work = [self.packer.work(shard.batch, shard.members) for shard in shards]
        begun = [{k: share for k, share in own.items() if k < len(early)} for own in held]
        owners = owners_of(work, begun or [{}] * group.size)
        return Plan(owners, [shards[k] for k in owners[group.rank]], early)
