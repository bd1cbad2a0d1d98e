"""Packed micro-batches: sequences laid end to end in rows, with true borders, under a token budget.

Responses that share a prompt may share one copy of it (`shared_prefix`). What is packed together is a function of the
sequences and their order alone, never of when they arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.rl.shared_prefix import SharedRow, no_mask

_BEGINNING = 256  # tokens that a pass could go through in the time it takes to begin one
_ATTENTION = 2  # tokens that a pass could go through in the time of one more attention call in each layer


class Layout(NamedTuple):
    """Rows of sequence numbers that make one micro-batch."""

    rows: list[list[int]]
    shared: bool = False
    """The rows are groups of responses to one prompt, and are laid end to end in a single row."""


class MicroBatch(NamedTuple):
    """R rows of L tokens. `sequences` lists, in order of place, the numbers of the sequences packed here."""

    sequences: list[int]
    input_ids: Tensor  # [R, L]
    position_ids: Tensor  # [R, L] from 0 in each sequence
    mask: Tensor | None  # [R, 1, L, L] bool: causal, within one sequence; None where a row is one: causal says it all
    predicts: Tensor | None  # [R, L] bool: the next token is a response token of the same sequence; None if shared
    targets: Tensor  # [T] those next tokens that the model sampled, in row-major order of `predicts`
    shared: SharedRow | None = None  # prompts and responses of a single row, where responses share a prompt
    sampled: Tensor | None = None  # which of the next tokens the model sampled; None: all

    def predicting(self, hidden: Tensor) -> Tensor:
        """Select the hidden states that predict the targets: [R, L, D] -> [T, D]."""
        found = self.shared.predicting(hidden) if self.shared else hidden[self.predicts]
        return found if self.sampled is None else found[self.sampled]


def by_prompt(members: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group sequence numbers by equal prompts, in order of first appearance."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in members:
        groups.setdefault(tuple(prompts[i]), []).append(i)
    return list(groups.values())


def shared_tokens(prompt: int, responses: Sequence[int]) -> int:
    """Return the tokens to compute for a group: with one copy of its prompt if that is less work, else with one each.

    Work counts the attended pairs as `plan` does, without the hidden size: sharing saves as many pairs or more."""
    apart, together = sum(prompt + own for own in responses), prompt + sum(responses)
    return together if together + _ATTENTION * (1 + len(responses)) < apart else apart


def plan_shared(
    groups: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], most: int
) -> list[Layout]:
    """Fill micro-batches of up to `most` tokens with groups, one copy of a prompt in each that holds its responses.

    A response beyond the budget gets a micro-batch with its prompt alone."""
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
                layouts[-1].rows.append([])
                begun = True
            layouts[-1].rows[-1].append(i)
            room -= need
    return layouts


def plan(lengths: Sequence[int], max_tokens: int, hidden_size: int) -> list[list[list[int]]]:
    """Micro-batches of rows of sequence numbers, the longest first. The rows of one are as long as its longest
    sequence, and hold one each or as many as fit, whichever is less work; it takes in shorter ones as long as that is
    less work than to begin another. A sequence beyond the budget gets a row alone.

    Work is in tokens: attention costs one L / (6 hidden_size) of what all else does, and half of that where a row is
    one sequence, as attention that is causal and nothing else skips what it does not see.
    """
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches = []
    while left:
        rows = _least_work([lengths[i] for i in left], max_tokens, hidden_size)
        batches.append([[left[k] for k in row] for row in rows])
        left = left[sum(map(len, rows)) :]
    return batches


def _least_work(lengths: Sequence[int], max_tokens: int, hidden_size: int) -> list[list[int]]:
    """The rows of the first micro-batch of these, the longest first."""

    def work(rows: int, width: int, attended: float) -> float:
        return rows * width * (1 + attended * width / (6 * hidden_size))

    width = lengths[0]
    rest = [*accumulate((work(1, own, 0.5) for own in reversed(lengths)), initial=0.0)][::-1]
    rows: list[list[int]] = []  # first-fit
    room: list[int] = []
    found: list[tuple[float, int, bool]] = []  # work of all, how many are in this micro-batch, one a row
    for k, own in enumerate(lengths):
        row = next((r for r, free in enumerate(room) if free >= own), len(room))
        if row == len(room):
            if row and (row + 1) * width > max_tokens:
                break
            rows.append([])
            room.append(width)
        rows[row].append(k)
        room[row] -= own
        count = k + 1
        later = rest[count] + (_BEGINNING if rest[count] else 0)
        found.append((work(len(rows), width, 1.0) + later, count, False))
        if count == 1 or count * width <= max_tokens:
            found.append((work(count, width, 0.5) + later, count, True))
    _, count, alone = min(found)
    if alone:
        return [[k] for k in range(count)]
    return [short for row in rows if (short := [k for k in row if k < count])]


def pack(
    rows: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    device: torch.device,
) -> MicroBatch:
    """Lay out one planned micro-batch; `rows` hold sequence numbers, a sequence is its prompt and its response."""
    width = max(sum(len(prompts[i]) + len(responses[i]) for i in row) for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    position_ids = torch.arange(width).repeat(len(rows), 1)  # in gaps too: 0 would begin a sequence
    # gaps: each its own segment, so no row of the mask is empty
    segment = torch.arange(1, width + 1).neg().repeat(len(rows), 1)
    predicts = torch.zeros_like(input_ids, dtype=torch.bool)
    targets: list[int] = []
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            tokens = [*prompts[i], *responses[i]]
            end = at + len(tokens)
            input_ids[r, at:end] = torch.tensor(tokens)
            position_ids[r, at:end] = torch.arange(len(tokens))
            segment[r, at:end] = i
            predicts[r, at + len(prompts[i]) - 1 : end - 1] = True
            targets += responses[i]
            at = end
    mask = None
    if any(len(row) > 1 for row in rows):
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        mask = ((segment[:, None, :, None] == segment[:, None, None, :]) & causal).to(device)
    input_ids, position_ids, predicts, wanted = (
        t.to(device) for t in (input_ids, position_ids, predicts, torch.tensor(targets))
    )
    return MicroBatch([i for row in rows for i in row], input_ids, position_ids, mask, predicts, wanted)


def pack_shared(
    rows: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    device: torch.device,
) -> MicroBatch:
    """Lay out groups of one prompt each, end to end in one row: the prompt, then each of its responses."""
    tokens: list[int] = []
    positions: list[int] = []
    for row in rows:
        prompt = prompts[row[0]]
        tokens += prompt
        positions += range(len(prompt))
        for i in row:
            tokens += responses[i]
            positions += range(len(prompt), len(prompt) + len(responses[i]))
    sequences = [i for row in rows for i in row]
    targets = [token for i in sequences for token in responses[i]]
    layout = SharedRow([(len(prompts[row[0]]), [len(responses[i]) for i in row]) for row in rows], device)
    input_ids, position_ids = (torch.tensor([of], device=device) for of in (tokens, positions))
    wanted = torch.tensor(targets, dtype=torch.long, device=device)
    return MicroBatch(sequences, input_ids, position_ids, no_mask(device), None, wanted, layout)
