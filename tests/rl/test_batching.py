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


@pytest.mark.parametrize(
    ("lengths", "budget", "hidden", "expected"),
    [
        ([5, 12, 2, 4], 24, 4096, [[[1], [0, 3, 2]]]),
        # causal attention saves more than gaps cost
        ([300] * 4, 4096, 128, [[[0], [1], [2], [3]]]),
        # two rows of 300 with attention of 300 / 768 are 834 tokens, three rows with half of it 1,076; 300 and two of
        # 150 apart are 688, and beginning a pass takes 256
        ([150, 300, 150], 4096, 128, [[[1], [0, 2]]]),
        # beside 600, six of 120 fill two rows more: 1,069 tokens each; apart, one row each, they are 6 x 129
        ([600, *[120] * 6], 4096, 128, [[[0]], [[1], [2], [3], [4], [5], [6]]]),
    ],
    ids=["first fit", "rows of one", "packed beside a longer one", "short ones apart"],
)
def test_layouts_of_lengths_by_hand(lengths: list[int], budget: int, hidden: int, expected: list[Rows]) -> None:
    assert plan(lengths, budget, hidden) == expected


def work(rows: Rows) -> float:
    """Return the work of a micro-batch whose rows have these lengths in tokens."""
    width = max(map(max, rows))
    attended = 0.5 if all(len(row) == 1 for row in rows) else 1.0
    return 256 + len(rows) * width * (1 + attended * width / (6 * SIZE))


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


def least_work(lengths: list[int], budget: int) -> float:
    """Return the least work over all ways to cut descending lengths."""
    if not lengths:
        return 0.0
    firsts = ((k, rows) for k in range(1, len(lengths) + 1) for rows in layouts(lengths[:k], budget))
    return min(work(rows) + least_work(lengths[k:], budget) for k, rows in firsts)


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=7), st.integers(1, 1500))
def test_no_other_cut_needs_less_work(lengths: list[int], budget: int) -> None:
    planned = [[[lengths[i] for i in row] for row in rows] for rows in plan(lengths, budget, SIZE)]
    assert sum(map(work, planned)) == pytest.approx(least_work(sorted(lengths, reverse=True), budget))


def test_layout_by_hand() -> None:
    micro = pack([[0, 1], [2]], [[1, 2], [3], [4]], [[5, 6], [7], [8, 9]], CPU)
    assert micro.sequences == [0, 1, 2]
    assert micro.input_ids.tolist() == [[1, 2, 5, 6, 3, 7], [4, 8, 9, 0, 0, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert micro.predicts.int().tolist() == [[0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0]]
    assert micro.targets.tolist() == [5, 6, 7, 8, 9]
    assert micro.mask is not None
    assert micro.mask.shape == (2, 1, 6, 6)
    assert micro.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(1, 40))
def test_a_token_attends_to_earlier_ones_of_its_sequence_and_predicts_the_next(
    sequences: list[tuple[list[int], list[int]]], budget: int
) -> None:
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


@pytest.mark.parametrize("gap", [0, 3])
def test_no_row_of_the_mask_is_empty(gap: int) -> None:
    """A softmax over nothing would be NaN."""
    micro = pack([[0], [1]], [[1] * (2 + gap), [1]], [[1], [1]], CPU)
    assert micro.mask is None
    micro = pack([[0, 1], [2]], [[1] * (2 + gap), [1], [1]], [[1], [1], [1]], CPU)
    assert micro.mask is not None
    assert micro.mask.any(-1).all()
