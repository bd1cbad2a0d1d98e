"""The buffer of training data: the responses that it takes and drops, and its bound in tokens."""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tlt.draft.features import Harvest
from tlt.spot.buffer import HarvestBuffer, pieces


def harvest(start: int, length: int, prompt_length: int = 0) -> Harvest:
    return Harvest(0, start, prompt_length, torch.zeros(length, dtype=torch.long), torch.zeros(length, 2))


@given(lengths=st.lists(st.integers(2, 30), max_size=30), most=st.integers(1, 60))
def test_the_newest_responses_are_kept_within_the_bound(lengths: list[int], most: int) -> None:
    buffer = HarvestBuffer(most)
    for i, length in enumerate(lengths):
        buffer.add(harvest(i, length))
        assert buffer.tokens == sum(len(item.tokens) for item in buffer.items)
        assert buffer.tokens <= most or len(buffer.items) == 1
        kept = [item.start for item in buffer.items]
        assert kept == list(range(i + 1 - len(kept), i + 1)), "the newest, in order"
        if len(kept) <= i:  # one more would have been too much
            assert buffer.tokens + lengths[i - len(kept)] > most


@pytest.mark.parametrize("item", [harvest(0, 5, prompt_length=6), harvest(3, 1)], ids=["a prompt", "one entry"])
def test_responses_without_training_tokens_are_not_kept(item: Harvest) -> None:
    """Entry p predicts token p + 2, and its teacher is entry p + 1 of the same response."""
    buffer = HarvestBuffer(100)
    buffer.add(harvest(0, 5, prompt_length=5))
    buffer.add(item)
    assert buffer.tokens == 5


def test_a_finished_rollout_keeps_the_responses_that_end_latest() -> None:
    """It may take a quarter of the room. The current rollout drops only its own responses."""
    buffer = HarvestBuffer(80)
    for start, length in ((0, 8), (0, 12), (30, 4), (0, 10)):
        buffer.add(harvest(start, length))
    buffer.rollout_ended()
    assert [item.end for item in buffer.latest] == [34, 12]
    assert buffer.tokens == 4 + 12
    for length in (20, 21, 22, 22):
        buffer.add(harvest(0, length))
    assert [item.end for item in buffer.items] == [34, 12, 22, 22]
    buffer.rollout_ended()
    assert [item.end for item in buffer.items] == [34, 12, 22], "one response is always kept"
    buffer.rollout_ended()
    assert [item.end for item in buffer.items] == [22], "two rollouts before the last one is too old"


@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=20), tokens=st.integers(8, 80), seed=st.integers(0, 9))
def test_a_sample_is_never_larger_than_asked_for(lengths: list[int], tokens: int, seed: int) -> None:
    buffer = HarvestBuffer(10_000)
    for i, length in enumerate(lengths):
        buffer.add(numbered(100 * i, length))
    buffer.rollout_ended()
    buffer.rollout_ended()
    drawn = buffer.sample(tokens, random.Random(seed))
    assert drawn
    assert sum(len(item.tokens) for item in drawn) <= tokens
    assert len({item.start // 100 for item in drawn}) == len(drawn)
    for item in drawn:  # entries keep their true positions, cut or not
        assert item.tokens.tolist() == list(range(item.start, item.end))
        assert item.features[:, 0].tolist() == item.tokens.tolist()
    left = tokens - sum(len(item.tokens) for item in drawn)
    others = [item for item in buffer.past if item.start // 100 not in {one.start // 100 for one in drawn}]
    assert left < tokens // 8 or all(len(item.tokens) > left for item in others), "it is nearly full"


def test_pieces_have_draft_tokens() -> None:
    items = [harvest(0, 8, prompt_length=9), harvest(0, 8)]
    assert pieces(items, 100, 64, random.Random(0)) == items[1:]


def numbered(start: int, length: int) -> Harvest:
    tokens = torch.arange(start, start + length)
    return Harvest(0, start, 0, tokens, tokens[:, None].expand(-1, 2).float())


def test_samples_are_from_earlier_rollouts_and_newer_items_are_drawn_more_often() -> None:
    """The last whole rollout is for evaluations, and the present one for neither. An older item has 0.97 of the weight
    for each step."""
    buffer, rng = HarvestBuffer(10_000, steps=3), random.Random(0)
    for version in range(0, 50, 10):
        buffer.rollout_ended()
        buffer.add(harvest(0, 10)._replace(target_version=version))
    assert [item.target_version for item in buffer.latest] == [30]
    drawn = Counter(buffer.sample(10, rng)[0].target_version for _ in range(11_000))
    weights = {version: 0.97 ** (20 - version) for version in (0, 10, 20)}
    expected = {version: 11_000 * weight / sum(weights.values()) for version, weight in weights.items()}
    assert dict(drawn) == pytest.approx(expected, rel=0.06)


def test_dropped_responses_are_not_trained_on() -> None:
    """The last whole rollout and the present one are kept. The space of the others is free."""
    buffer, rng = HarvestBuffer(10_000, steps=3), random.Random(0)
    for version in range(5):
        buffer.rollout_ended()
        buffer.add(harvest(0, 10 + version)._replace(target_version=version))
    buffer.forget()
    assert buffer.past == []
    assert [item.target_version for item in buffer.items] == [3, 4]
    assert buffer.tokens == 13 + 14
    assert buffer.sample(100, rng) == []
    buffer.rollout_ended()
    assert {buffer.sample(10, rng)[0].target_version for _ in range(20)} == {3}


def test_a_sample_is_of_one_version() -> None:
    buffer = HarvestBuffer(10_000, steps=3)
    for version in range(3):
        for _ in range(4):
            buffer.add(harvest(0, 10)._replace(target_version=version))
        buffer.rollout_ended()
    drawn = [{item.target_version for item in buffer.sample(40, random.Random(seed))} for seed in range(50)]
    assert {len(versions) for versions in drawn} == {1}
    assert set.union(*drawn) == {0, 1}
