"""Micro-batches in which each sequence has a row of its own."""

from __future__ import annotations

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


@given(LENGTHS, st.integers(1, 100))
def test_every_sequence_has_one_place_within_the_budget_unless_it_is_longer(lengths: list[int], budget: int) -> None:
    batches = plan(lengths, budget, SIZE)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        assert len(batch) * max(lengths[i] for i in batch) <= budget or len(batch) == 1


def work(lengths: list[int], size: int) -> float:
    """Return the work of a micro-batch of sequences with these lengths in tokens."""
    return 256 + len(lengths) * max(lengths) * (1 + max(lengths) / (12 * size))


def least_work(lengths: list[int], budget: int, size: int) -> float:
    """Return the least work over all ways to cut descending lengths."""
    if not lengths:
        return 0.0
    firsts = (k for k in range(1, len(lengths) + 1) if k == 1 or k * lengths[0] <= budget)
    return min(work(lengths[:k], size) + least_work(lengths[k:], budget, size) for k in firsts)


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=7), st.integers(1, 1500), st.sampled_from([SIZE, 128, 4096]))
def test_no_other_cut_needs_less_work(lengths: list[int], budget: int, size: int) -> None:
    found = sum(work([lengths[i] for i in members], size) for members in plan(lengths, budget, size))
    assert found == pytest.approx(least_work(sorted(lengths, reverse=True), budget, size))


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(1, 40))
def test_a_row_holds_one_sequence_from_position_0(sequences: list[tuple[list[int], list[int]]], budget: int) -> None:
    prompts, responses = [p for p, _ in sequences], [r for _, r in sequences]
    whole = [p + r for p, r in sequences]
    for members in plan([*map(len, whole)], budget, SIZE):
        micro = pack(members, prompts, responses, CPU)
        assert micro.sequences == members
        assert micro.targets.tolist() == [token for i in members for token in responses[i]]
        for row, i in enumerate(members):
            places = range(len(whole[i]))
            assert micro.input_ids[row, : len(whole[i])].tolist() == whole[i]
            assert micro.position_ids[row, : len(whole[i])].tolist() == [*places]
            assert micro.predicts[row].nonzero()[:, 0].tolist() == [*places][len(prompts[i]) - 1 : -1]
