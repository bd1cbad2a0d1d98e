"""Packing of sequences into micro-batches: rows of concatenated sequences, within a token budget.

A sequence is a prompt and its response. The attention mask keeps sequences of one row apart. Responses to one prompt
may share one copy of it (`shared_prefix`). The packing depends only on the sequences and their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.rl.shared_prefix import SharedRow, no_mask

_BEGINNING = 256  # fixed cost of one micro-batch, in units of the cost of one token
_ATTENTION = 2  # cost of one additional attention call in every layer, in the same unit


class Layout(NamedTuple):
    """Plan of one micro-batch. Each element of `rows` has the sequence indices of one row."""

    rows: list[list[int]]
    shared: bool = False
    """Whether the responses of each row share one copy of their prompt. If so, all rows are concatenated into one
    tensor row."""


class MicroBatch(NamedTuple):
    """Input of one pass: tensors with R rows of L tokens. `sequences` has the sequence indices, in packing order."""

    sequences: list[int]
    input_ids: Tensor  # [R, L]
    position_ids: Tensor  # [R, L], from 0 in each sequence; a response continues the positions of its prompt
    mask: Tensor | None  # [R, 1, L, L] bool: causal in each sequence; None if each row is one sequence
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
                layouts[-1].rows.append([])
                begun = True
            layouts[-1].rows[-1].append(i)
            room -= need
    return layouts


def plan(lengths: Sequence[int], max_tokens: int, hidden_size: int) -> list[list[list[int]]]:
    """Return micro-batches as [micro-batch][row] -> sequence indices, the longest sequences first.

    The sequences are sorted by descending length. This list is cut into micro-batches such that the total work is
    least. Rows are as wide as the longest sequence of their micro-batch. Either each row has one sequence, or sequences
    share rows (first fit), whichever is less work. A sequence that exceeds `max_tokens` gets a micro-batch of its own.

    Work is measured in tokens. Each micro-batch costs `_BEGINNING` in addition. In rows of width L, attention
    multiplies the work of a token by 1 + L / (6 hidden_size). If each row is one sequence, the factor is only
    1 + L / (12 hidden_size), because plain causal attention skips the masked half.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    descending = [lengths[i] for i in order]
    best = [(0.0, 0, False)] * (len(order) + 1)  # for the sequences from each index on: work, first micro-batch
    for start in reversed(range(len(order))):
        best[start] = min(
            (_BEGINNING + work + best[start + count][0], count, alone)
            for work, count, alone in _first_micro_batches(descending[start:], max_tokens, hidden_size)
        )
    batches, start = [], 0
    while start < len(order):
        _, count, alone = best[start]
        members = order[start : start + count]
        batches.append([[i] for i in members] if alone else _in_rows(members, lengths))
        start += count
    return batches


def _first_micro_batches(
    lengths: Sequence[int], max_tokens: int, hidden_size: int
) -> Iterator[tuple[float, int, bool]]:
    """Yield each possible first micro-batch as (work, number of sequences, whether each sequence has its own row).
    `lengths` has the numbers of tokens of the sequences, in descending order."""

    def work(rows: int, attended: float) -> float:
        return rows * width * (1 + attended * width / (6 * hidden_size))

    width, rows = lengths[0], 0
    for count, row in enumerate(_first_fit(lengths), 1):
        rows = max(rows, row + 1)
        if rows > 1 and rows * width > max_tokens:
            return
        yield work(rows, 1.0), count, False
        if count == 1 or count * width <= max_tokens:
            yield work(count, 0.5), count, True


def _in_rows(members: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for i, row in zip(members, _first_fit([lengths[i] for i in members]), strict=True):
        rows.setdefault(row, []).append(i)
    return [*rows.values()]


def _first_fit(lengths: Sequence[int]) -> Iterator[int]:
    """Yield the row index of each sequence: the first row with room for it. Rows are as wide as the first sequence."""
    room: list[int] = []
    for own in lengths:
        row = next((r for r, free in enumerate(room) if free >= own), len(room))
        if row == len(room):
            room.append(lengths[0])
        room[row] -= own
        yield row


def pack(
    rows: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    device: torch.device,
) -> MicroBatch:
    """Return the tensors of one micro-batch. `rows` has the sequence indices of each row. A sequence is a prompt and
    its response."""
    width = max(sum(len(prompts[i]) + len(responses[i]) for i in row) for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    position_ids = torch.arange(width).repeat(len(rows), 1)  # padding never has position 0, which begins a sequence
    # each padding token is its own segment, so that every token attends at least to itself
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
    """Return the tensors of a micro-batch in which responses share prompts. `rows` has the sequence indices of each
    group. All groups are concatenated in one tensor row: each prompt, followed by its responses."""
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
