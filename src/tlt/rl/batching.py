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
    mask: Tensor  # [R, 1, L, L] bool: causal, within one sequence
    predicts: Tensor  # [R, L] bool: the next token is a response token of the same sequence
    targets: Tensor  # [T] those next tokens, in row-major order of `predicts`


def plan(lengths: Sequence[int], max_tokens: int, hidden_size: int) -> list[list[list[int]]]:
    """Micro-batches of rows of sequence numbers: the longest first, rows as long as the longest, gaps filled first-fit.

    Attention costs a token L / (6 hidden_size) of what all else does, so that sequences much shorter than the longest
    go into a micro-batch of their own where that saves more than it takes to begin one. A sequence beyond the budget
    gets a row alone.
    """
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches = []
    while left:
        width = lengths[left[0]]
        rows: list[list[int]] = [[] for _ in range(max(1, max_tokens // width))]
        room = [width] * len(rows)
        alike = _alike([lengths[i] for i in left], hidden_size)
        rest = []
        for i in left[:alike]:
            row = next((r for r, free in enumerate(room) if free >= lengths[i]), None)
            if row is None:
                rest.append(i)
            else:
                rows[row].append(i)
                room[row] -= lengths[i]
        batches.append([row for row in rows if row])
        left = rest + left[alike:]
    return batches


def _alike(lengths: Sequence[int], hidden_size: int) -> int:
    """How many of these, the longest first, share rows as long as the first."""
    beyond = list(accumulate(reversed(lengths)))[::-1]  # tokens from each one on
    saved = [tokens * (lengths[0] - own) / (6 * hidden_size) for tokens, own in zip(beyond, lengths, strict=True)]
    best = max(range(len(lengths)), key=lambda i: saved[i])
    return best if saved[best] > _BEGINNING else len(lengths)


def pack(
    rows: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    device: torch.device,
) -> MicroBatch:
    """Lay out one planned micro-batch; `rows` hold sequence numbers, a sequence is its prompt and its response."""
    width = max(sum(len(prompts[i]) + len(responses[i]) for i in row) for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    position_ids = torch.zeros_like(input_ids)
    segment = (
        torch.arange(1, width + 1).neg().repeat(len(rows), 1)
    )  # gaps: each its own segment, so no row of the mask is empty
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
    mask = (segment[:, :, None] == segment[:, None, :]) & torch.ones(width, width, dtype=torch.bool).tril()
    tensors = (input_ids, position_ids, mask[:, None], predicts, torch.tensor(targets))
    return MicroBatch([i for row in rows for i in row], *(t.to(device) for t in tensors))
