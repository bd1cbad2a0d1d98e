"""The harvest's buffer: what it takes, what it drops, and how many tokens it holds."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tlt.draft.buffer import Harvest, HarvestBuffer


def harvest(start: int, length: int, prompt_length: int = 0) -> Harvest:
    return Harvest(0, start, prompt_length, torch.zeros(length, dtype=torch.long), torch.zeros(length, 2))


@given(start=st.integers(0, 20), length=st.integers(1, 20), prompt_length=st.integers(1, 30))
def test_drafted_counts_the_entries_whose_next_guess_is_of_the_response(
    start: int, length: int, prompt_length: int
) -> None:
    """Entry p predicts token p + 2, and its teacher is entry p + 1 of the same harvest."""
    entries = range(start, start + length)
    want = sum(p + 1 in entries and p + 2 >= prompt_length for p in entries)
    assert harvest(start, length, prompt_length).drafted == want


@given(lengths=st.lists(st.integers(2, 30), max_size=30), most=st.integers(1, 60))
def test_the_newest_stay_under_the_bound(lengths: list[int], most: int) -> None:
    buffer = HarvestBuffer(most)
    for i, length in enumerate(lengths):
        buffer.add(harvest(i, length))
        assert buffer.tokens == sum(len(item.tokens) for item in buffer.items)
        assert buffer.tokens <= most or len(buffer.items) == 1
        kept = [item.start for item in buffer.items]
        assert kept == list(range(i + 1 - len(kept), i + 1)), "the newest, in order"
        if len(kept) <= i:  # one more would have been too much
            assert buffer.tokens + lengths[i - len(kept)] > most


@pytest.mark.parametrize("item", [harvest(0, 5, prompt_length=9), harvest(3, 1)], ids=["a prompt", "one entry"])
def test_what_teaches_nothing_is_not_kept(item: Harvest) -> None:
    buffer = HarvestBuffer(100)
    buffer.add(harvest(0, 5))
    buffer.add(item)
    assert buffer.tokens == 5
