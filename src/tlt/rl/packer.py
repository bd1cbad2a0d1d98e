"""Division of a batch into shards, which the members of a process group compute, and of a shard into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tlt.rl.batching import Layout, MicroBatch, by_prompt, pack, pack_shared, plan, plan_shared, shared_tokens
from tlt.rl.parallel import ProcessGroup, all_shards, own_shards
from tlt.types import TrainBatch


@dataclass
class Packer:
    """Divider of batches into shards and micro-batches. `members` are response indices. The result never depends on
    timing or on which workers are alive."""

    max_tokens: int
    """largest number of tokens in a micro-batch; a longer sequence gets a micro-batch of its own"""
    hidden_size: int
    device: torch.device
    shares: bool
    """whether responses to one prompt may share one copy of it in a micro-batch"""

    def shards(self, batch: TrainBatch, members: Sequence[int], group: ProcessGroup) -> list[list[int]]:
        """Return this process's shards of the responses `members`. Responses to one prompt stay together if that
        reduces the work of the largest shard."""
        return own_shards(self._groups(batch, members), lambda part: self._tokens(batch, part), group)

    def all_shards(self, batch: TrainBatch, members: Sequence[int], count: int) -> list[list[int]]:
        """Return `count` shards of the responses `members`, for all processes of the group."""
        return all_shards(self._groups(batch, members), lambda part: self._tokens(batch, part), count)

    def work(self, batch: TrainBatch, members: Sequence[int]) -> int:
        """Return the number of tokens to compute for the responses `members`, with shared prompts counted once."""
        return sum(self._tokens(batch, part) for part in self._groups(batch, members))

    def plan(self, batch: TrainBatch, members: Sequence[int]) -> list[Layout]:
        """Return micro-batches of the responses `members`. Prompts are shared if that is less work."""
        groups = self._groups(batch, members)
        shared = [group for group in groups if self._tokens(batch, group) < sum(batch.lengths(group))]
        sharing = {i for group in shared for i in group}
        rest = [i for i in members if i not in sharing]
        rows = plan(batch.lengths(rest), self.max_tokens, self.hidden_size)
        return [
            *plan_shared(shared, batch.prompt_ids, batch.response_ids, self.max_tokens),
            *(Layout([[rest[k] for k in row] for row in of_one]) for of_one in rows),
        ]

    def pack(self, batch: TrainBatch, layout: Layout) -> MicroBatch:
        lay_out = pack_shared if layout.shared else pack
        micro = lay_out(layout.rows, batch.prompt_ids, batch.response_ids, self.device)
        if batch.masks.keys().isdisjoint(micro.sequences):
            return micro
        sampled = torch.tensor([own for i in micro.sequences for own in batch.mask(i)], device=self.device)
        return micro._replace(targets=micro.targets[sampled], sampled=sampled)

    def _groups(self, batch: TrainBatch, members: Sequence[int]) -> list[list[int]]:
        return by_prompt(members, batch.prompt_ids) if self.shares else [[i] for i in members]

    def _tokens(self, batch: TrainBatch, group: Sequence[int]) -> int:
        """Return the number of tokens to compute for responses that have the same prompt."""
        return shared_tokens(len(batch.prompt_ids[group[0]]), [len(batch.response_ids[i]) for i in group])
