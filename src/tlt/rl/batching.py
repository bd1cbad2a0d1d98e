"""Micro-batches: rows of sequences within a token budget.

A sequence is a prompt and its response. All sequences of a micro-batch are concatenated in one row. Responses to one
prompt share one copy of it. Attention keeps the sequences apart (`shared_prefix`). The micro-batches depend only on the
sequences and their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.rl.parallel import all_shards
from tlt.rl.shared_prefix import SharedRow
from tlt.types import TrainBatch

Layout = Sequence[Sequence[int]]
"""Plan of one micro-batch: groups of sequence indices. Each group has responses to one prompt, in the order of the
row."""


class MicroBatch(NamedTuple):
    """Input of one pass: a row of L tokens. `sequences` has the sequence indices, in the order of the row."""

    sequences: list[int]
    input_ids: Tensor  # [1, L]
    position_ids: Tensor  # [1, L], from 0 in each prompt; each response continues the positions of its prompt
    targets: Tensor  # [T] response tokens that the model sampled
    predicts: Tensor  # [T] place in the row of the token that predicts each target
    row: SharedRow | None  # layout of the row; None if it is one sequence, which needs none

    def predicting(self, hidden: Tensor) -> Tensor:
        """Select the hidden states that predict the targets: [L, D] -> [T, D]."""
        return hidden.index_select(
            0, self.predicts
        )  # indexing would add gradients in an order that varies with threads


def by_prompt(members: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the sequence indices `members`, grouped by equal prompts. Groups are in order of first appearance."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in members:
        groups.setdefault(tuple(prompts[i]), []).append(i)
    return list(groups.values())


def plan(
    groups: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], most: int
) -> list[Layout]:
    """Return plans of micro-batches.

    `groups` has the sequence indices of each prompt. `most` is the largest number of tokens in a micro-batch. A group
    that is split over several micro-batches has a copy of its prompt in each. A response that together with its prompt
    has more than `most` tokens gets a micro-batch of its own."""
    layouts: list[list[list[int]]] = []
    room = 0
    for group in groups:
        begun = False
        for i in group:
            need = len(responses[i]) + (0 if begun else len(prompts[i]))
            if need > room:
                layouts.append([])
                room, begun = most, False
                need = len(prompts[i]) + len(responses[i])
            if not begun:
                layouts[-1].append([])
                begun = True
            layouts[-1][-1].append(i)
            room -= need
    return [*layouts]


def pack(
    layout: Layout, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], device: torch.device
) -> MicroBatch:
    """Return the tensors of one micro-batch: each prompt, followed by the responses to it."""
    tokens, positions, targets, predicts = list[int](), list[int](), list[int](), list[int]()
    for group in layout:
        prompt = prompts[group[0]]
        tokens += prompt
        positions += range(len(prompt))
        last = len(tokens) - 1  # the prompt's last token predicts the first token of each response
        for i in group:
            own = responses[i]
            predicts += [last, *range(len(tokens), len(tokens) + len(own) - 1)][: len(own)]
            tokens += own
            positions += range(len(prompt), len(prompt) + len(own))
            targets += own
    sequences = [i for group in layout for i in group]
    groups = [(len(prompts[group[0]]), [len(responses[i]) for i in group]) for group in layout]
    row = SharedRow(groups) if len(sequences) > 1 else None
    input_ids, position_ids = (torch.tensor([of], device=device) for of in (tokens, positions))
    wanted, places = (torch.tensor(of, dtype=torch.long, device=device) for of in (targets, predicts))
    return MicroBatch(sequences, input_ids, position_ids, wanted, places, row)


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
