"""Division of a batch into shards, early ones first, and of shards into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tlt.config import TrainConfig
from tlt.rl.batching import Layout, MicroBatch, by_prompt, pack, plan
from tlt.rl.early import Counts, counts_early, cut, has_early_shards, has_gradient, needs_logprobs, owners_of
from tlt.rl.parallel import ProcessGroup, all_shards
from tlt.rl.shard_sum import Plan, Shard
from tlt.types import TrainBatch

Held = Sequence[Mapping[int, float]]
"""Early shards that each member has begun, as [member] -> {shard index: fraction that is done}."""


@dataclass
class Packer:
    """Divider of batches into shards and micro-batches. `members` are response indices. The result never depends on
    timing or on which workers are alive."""

    max_tokens: int
    """largest number of tokens in a micro-batch; a longer sequence gets a micro-batch of its own"""
    device: torch.device
    shares: bool
    """whether sequences may share a row, and responses their prompt; if not, each sequence is a micro-batch"""

    def all_shards(self, batch: TrainBatch, members: Sequence[int], count: int) -> list[list[int]]:
        """Return `count` shards of the responses `members`, for all processes of the group. Responses to one prompt
        stay together if that reduces the work of the largest shard."""
        return all_shards(self._groups(batch, members), lambda part: self._tokens(batch, part), count)

    def work(self, batch: TrainBatch, members: Sequence[int]) -> int:
        """Return the number of tokens to compute for the responses `members`, with shared prompts counted once."""
        return sum(self._tokens(batch, part) for part in self._groups(batch, members))

    def plan(self, batch: TrainBatch, members: Sequence[int]) -> list[Layout]:
        """Return micro-batches of the responses `members`."""
        most = self.max_tokens if self.shares else 0
        return plan(self._groups(batch, members), batch.prompt_ids, batch.response_ids, most)

    def pack(self, batch: TrainBatch, layout: Layout) -> MicroBatch:
        micro = pack(layout, batch.prompt_ids, batch.response_ids, self.device)
        if batch.masks.keys().isdisjoint(micro.sequences):
            return micro
        sampled = torch.tensor([own for i in micro.sequences for own in batch.mask(i)], device=self.device)
        return micro._replace(targets=micro.targets[sampled], predicts=micro.predicts[sampled])

    def _groups(self, batch: TrainBatch, members: Sequence[int]) -> list[list[int]]:
        return by_prompt(members, batch.prompt_ids) if self.shares else [[i] for i in members]

    def _tokens(self, batch: TrainBatch, group: Sequence[int]) -> int:
        """Return the number of tokens to compute for responses that have the same prompt."""
        return len(batch.prompt_ids[group[0]]) + sum(len(batch.response_ids[i]) for i in group)


@dataclass
class Planner:
    """Planner of shards. The shards depend only on the batch and these settings. Their owners also depend on which
    early shards each member has begun."""

    train: TrainConfig
    prompts: int
    """number of prompts in a step"""
    packer: Packer

    def of_gradients(self, batch: TrainBatch, members: Sequence[int], group: ProcessGroup, held: Held) -> Plan:
        """Return the plan for the gradients of an optimizer step. `members`: indices of its responses. Only
        responses that have a gradient are computed."""
        return self._plan(batch, members, has_gradient, group, held)

    def of_logprobs(self, batch: TrainBatch, group: ProcessGroup, held: Held) -> Plan:
        """Return the plan for the log-probs that are computed before the first gradient."""
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
