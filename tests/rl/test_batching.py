"""Packed micro-batches: each sequence is there once, within the budget, and attends to no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.rl.batching import pack, plan

LENGTHS = st.lists(st.integers(1, 40), max_size=30)
CPU = torch.device("cpu")
SIZE = 8  # hidden: so small that rows of 40 tokens are cut as others are at thousands
TOKENS = st.lists(st.integers(1, 99), min_size=1, max_size=6)
SEQUENCES = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6)
Rows = list[list[int]]


@given(LENGTHS, st.integers(1, 100))
def test_every_sequence_has_one_place_within_the_budget_unless_it_is_longer(lengths: list[int], budget: int) -> None:
    batches = plan(lengths, budget, SIZE)
    assert sorted(i for batch in batches for row in batch for i in row) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        assert all(batch)
        width = max(sum(lengths[i] for i in row) for row in batch)
        assert len(batch) * width <= budget or [len(row) for row in batch] == [1]


def work(rows: Rows, size: int) -> float:
    """Return the work of a micro-batch whose rows have these lengths in tokens. Causal attention does half of it."""
    width = max(map(max, rows))
    attended = 0.5 if all(len(row) == 1 for row in rows) else 1.0
    return 256 + len(rows) * width * (1 + attended * width / (6 * size))


def layouts(part: list[int], budget: int) -> Iterator[Rows]:
    """Return both layouts of descending lengths, if they are within the budget."""
    packed: Rows = []
    for own in part:
        fitting = [row for row in packed if sum(row) + own <= part[0]]
        if fitting:
            fitting[0].append(own)
        else:
            packed.append([own])
    yield from (rows for rows in (packed, [[own] for own in part]) if len(rows) == 1 or len(rows) * part[0] <= budget)


def least_work(lengths: list[int], budget: int, size: int) -> float:
    """Return the least work over all ways to cut descending lengths."""
    if not lengths:
        return 0.0
    firsts = ((k, rows) for k in range(1, len(lengths) + 1) for rows in layouts(lengths[:k], budget))
    return min(work(rows, size) + least_work(lengths[k:], budget, size) for k, rows in firsts)


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=7), st.integers(1, 1500), st.sampled_from([SIZE, 128, 4096]))
def test_no_other_cut_needs_less_work(lengths: list[int], budget: int, size: int) -> None:
    planned = [[[lengths[i] for i in row] for row in rows] for rows in plan(lengths, budget, size)]
    found = sum(work(rows, size) for rows in planned)
    assert found == pytest.approx(least_work(sorted(lengths, reverse=True), budget, size))


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(1, 40))
def test_a_token_attends_to_its_own_sequence(sequences: list[tuple[list[int], list[int]]], budget: int) -> None:
    prompts, responses = [p for p, _ in sequences], [r for _, r in sequences]
    whole = [p + r for p, r in sequences]
    for rows in plan([*map(len, whole)], budget, SIZE):
        micro = pack(rows, prompts, responses, CPU)
        places = micro.predicts.nonzero().tolist()
        assert micro.targets.tolist() == [micro.input_ids[r, place + 1].item() for r, place in places]
        assert micro.targets.tolist() == [token for i in micro.sequences for token in responses[i]]
        for r, row in enumerate(rows):
            owners: list[Any] = [(i, t) for i in row for t in range(len(whole[i]))]  # None in a gap
            owners += [None] * (micro.input_ids.shape[1] - len(owners))
            for q, asking in enumerate(owners):
                if asking:
                    assert micro.input_ids[r, q] == whole[asking[0]][asking[1]]
                    assert micro.position_ids[r, q] == asking[1]
                for k, asked in enumerate(owners):
                    same = q == k if asking is None or asked is None else asking[0] == asked[0]
                    if micro.mask is not None:
                        assert micro.mask[r, 0, q, k].item() == (same and k <= q)
                    elif asking is not None and k <= q:  # causal attention, and nothing else
                        assert same
