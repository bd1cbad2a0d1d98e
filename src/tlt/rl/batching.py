"""Micro-batches of sequences within a token budget.

A sequence is a prompt and its response. It has a row of its own, or shares one copy of its prompt with other responses
(`shared_prefix`). So the model itself decides what a token attends to: windows and chunks of layers are never replaced
by a mask. The micro-batches depend only on the sequences and their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.rl.shared_prefix import SharedRow

_BEGINNING = 256  # fixed cost of one micro-batch, in units of the cost of one token
_ATTENTION = 2  # cost of one additional attention call in every layer, in the same unit


class Layout(NamedTuple):
    """Plan of one micro-batch. `groups` has indices of sequences with equal prompts."""

    groups: list[list[int]]
    shared: bool = False
    """Whether the responses of each group share one copy of their prompt. If so, all groups are concatenated into one
    tensor row. If not, each sequence has its own row."""

    @property
    def sequences(self) -> list[int]:
        """Indices of all sequences, in packing order."""
        return [i for group in self.groups for i in group]


class MicroBatch(NamedTuple):
    """Input of one pass: tensors with R rows of L tokens. `sequences` has the sequence indices, in packing order."""

    sequences: list[int]
    input_ids: Tensor  # [R, L], padded at the end: attention is causal, so no token attends to padding
    position_ids: Tensor  # [R, L], from 0 in each sequence; a response continues the positions of its prompt
    predicts: Tensor | None  # [R, L] bool: the next token is a response token; None if `shared` is given
    targets: Tensor  # [T] response tokens that the model sampled, in packing order
    shared: SharedRow | None = None  # layout of the single row if responses share a prompt
    sampled: Tensor | None = None  # [response tokens] bool: the model sampled the token; None if all true

    def predicting(self, hidden: Tensor) -> Tensor:
        """Select the hidden states that predict the target tokens: [R, L, D] -> [T, D]."""
        found = self.shared.predicting(hidden) if self.shared else hidden[self.predicts]
        return found if self.sampled is None else found[self.sampled]


def by_prompt(members: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the sequence indices `members`, grouped by equal prompts. Groups are in order of first appearance."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in members:
        groups.setdefault(tuple(prompts[i]), []).append(i)
    return list(groups.values())


def shared_tokens(prompt: int, responses: Sequence[int]) -> int:
    """Return the number of tokens to compute for responses to one prompt. The arguments are numbers of tokens.

    The prompt is computed once for all responses if this is less work, else once per response. Work is tokens plus the
    cost of attention calls. The quadratic cost of attention is not counted, because sharing never increases it."""
    apart, together = sum(prompt + own for own in responses), prompt + sum(responses)
    return together if together + _ATTENTION * (1 + len(responses)) < apart else apart


def plan_shared(
    groups: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], most: int
) -> list[Layout]:
    """Return plans of micro-batches in which responses to one prompt share one copy of it.

    `groups` has the sequence indices of each prompt. `most` is the largest number of tokens in a micro-batch. A group
    that is split over several micro-batches has a copy of its prompt in each. A response that together with its prompt
    has more than `most` tokens gets a micro-batch of its own."""
    layouts: list[Layout] = []
    room = 0
    for group in groups:
        begun = False
        for i in group:
            need = len(responses[i]) + (0 if begun else len(prompts[i]))
            if need > room:
                layouts.append(Layout([], shared=True))
                room, begun = most, False
                need = len(prompts[i]) + len(responses[i])
            if not begun:
                layouts[-1].groups.append([])
                begun = True
            layouts[-1].groups[-1].append(i)
            room -= need
    return layouts


def plan(lengths: Sequence[int], max_tokens: int, hidden_size: int) -> list[list[int]]:
    """Return micro-batches as lists of sequence indices, the longest sequences first.

    The sequences are sorted by descending length. This list is cut into micro-batches such that the total work is
    least. Each sequence is padded to the longest of its micro-batch. A sequence that exceeds `max_tokens` gets a
    micro-batch of its own.

    Work is measured in tokens. Each micro-batch costs `_BEGINNING` in addition. In rows of width L, causal attention
    multiplies the work of a token by 1 + L / (12 hidden_size).
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    best = [(0.0, 0)] * (len(order) + 1)  # for the sequences from each index on: work, size of the first micro-batch
    for start in reversed(range(len(order))):
        width = lengths[order[start]]
        work = width * (1 + width / (12 * hidden_size))
        most = min(max(1, max_tokens // width), len(order) - start)
        best[start] = min((_BEGINNING + k * work + best[start + k][0], k) for k in range(1, most + 1))
    batches, start = [], 0
    while start < len(order):
        batches.append(order[start : start + best[start][1]])
        start += best[start][1]
    return batches


def pack(
    members: Sequence[int],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    device: torch.device,
) -> MicroBatch:
    """Return the tensors of a micro-batch in which each of the sequences `members` has its own row."""
    width = max(len(prompts[i]) + len(responses[i]) for i in members)
    input_ids = torch.zeros(len(members), width, dtype=torch.long)
    predicts = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, i in enumerate(members):
        before, end = len(prompts[i]), len(prompts[i]) + len(responses[i])
        input_ids[row, :end] = torch.tensor([*prompts[i], *responses[i]])
        predicts[row, before - 1 : end - 1] = True
    position_ids = torch.arange(width, device=device).expand(len(members), -1)
    targets = torch.tensor([token for i in members for token in responses[i]], dtype=torch.long, device=device)
    return MicroBatch([*members], input_ids.to(device), position_ids, predicts.to(device), targets)


def pack_shared(
    groups: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    device: torch.device,
) -> MicroBatch:
    """Return the tensors of a micro-batch in which responses share prompts. `groups` has indices of sequences
    with equal prompts. All groups are concatenated in one tensor row: each prompt, followed by its responses."""
    tokens: list[int] = []
    positions: list[int] = []
    for group in groups:
        prompt = prompts[group[0]]
        tokens += prompt
        positions += range(len(prompt))
        for i in group:
            tokens += responses[i]
            positions += range(len(prompt), len(prompt) + len(responses[i]))
    sequences = [i for group in groups for i in group]
    targets = [token for i in sequences for token in responses[i]]
    layout = SharedRow([(len(prompts[group[0]]), [len(responses[i]) for i in group]) for group in groups])
    input_ids, position_ids = (torch.tensor([of], device=device) for of in (tokens, positions))
    wanted = torch.tensor(targets, dtype=torch.long, device=device)
    return MicroBatch(sequences, input_ids, position_ids, None, wanted, layout)
