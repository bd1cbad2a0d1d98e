"""Packed micro-batches: sequences laid end to end in rows, with true borders, under a token budget.

What is packed together is a function of the sequences' lengths and order alone, never of when they arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

_BEGINNING = 256  # tokens that a pass could go through in the time it takes to begin one


class MicroBatch(NamedTuple):
    """R rows of L tokens. `sequences` lists, in order of place, the numbers of the sequences packed here."""

    sequences: list[int]
    input_ids: Tensor  # [R, L]
    position_ids: Tensor  # [R, L] from 0 in each sequence
    mask: Tensor | None  # [R, 1, L, L] bool: causal, within one sequence; None where a row is one: causal says it all
    predicts: Tensor  # [R, L] bool: the next token is a response token of the same sequence
    targets: Tensor  # [T] those next tokens, in row-major order of `predicts`


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
