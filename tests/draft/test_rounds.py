"""Expected rounds against a walk through all that may happen, and against rounds that are played."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.draft.rounds import expected_rounds


def played(right: Sequence[Sequence[float]], rng: random.Random) -> tuple[float, float]:
    """One sequence, decoded once: rounds, the last one by its share within it, and right first guesses."""
    at, rounds, firsts = 0, 0.0, 0.0
    while at < len(right):
        guesses = 0
        while guesses < len(right[at]) and rng.random() < right[at][guesses]:
            guesses += 1
        share = min(1.0, (len(right) - at) / (guesses + 1))
        rounds += share
        firsts += share * right[at][0]
        at += guesses + 1
    return rounds, firsts


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 20), depth=st.integers(1, 5))
def test_it_is_the_mean_of_rounds_that_are_played(seed: int, length: int, depth: int) -> None:
    rng = random.Random(seed)
    right = [[rng.random() for _ in range(depth)] for _ in range(length)]
    many = [played(right, rng) for _ in range(4000)]
    rounds, firsts = expected_rounds(torch.tensor(right), torch.zeros(length))
    assert rounds == pytest.approx(sum(one for one, _ in many) / len(many), rel=0.05)
    assert firsts == pytest.approx(sum(one for _, one in many) / len(many), rel=0.1, abs=0.02)


def test_by_hand() -> None:
    """Two guesses, each right with 1/2, at three entries: a round commits 1, 2 or 3 with 1/2, 1/4 and 1/4."""
    half = torch.full((3, 2), 0.5)
    last = 1 / 2 + 1 / 4 / 2 + 1 / 4 / 3  # at the last entry, a round is within it by so much
    second = 1 / 2 + 1 / 4 + 1 / 4 * 2 / 3
    whole = 1 + second / 2 + (1 / 4 + 1 / 2 * 1 / 2) * last
    assert expected_rounds(half, torch.zeros(3))[0] == pytest.approx(whole)


def test_guesses_that_are_always_or_never_right() -> None:
    assert expected_rounds(torch.ones(12, 3), torch.zeros(12)) == (3.0, 3.0)
    assert expected_rounds(torch.zeros(12, 3), torch.zeros(12)) == (12.0, 0.0)
    assert expected_rounds(torch.zeros(0, 3), torch.zeros(0)) == (0.0, 0.0)


def test_every_sequence_begins_with_a_round_of_its_own() -> None:
    right, segments = torch.ones(8, 3), torch.tensor([2, 2, 2, 2, 0, 0, 5, 5])
    assert expected_rounds(right, segments)[0] == pytest.approx(1.0 + 0.5 + 0.5)


def test_where_drafting_is_hard_rounds_are_many() -> None:
    """Nine entries of ten are drafted without a fault. The mean entry's chain commits far more than the mean round."""
    right = torch.ones(100, 7)
    right[:, :] = torch.tensor([0.0 if (i + 1) % 10 == 0 else 1.0 for i in range(107)]).unfold(0, 7, 1)[:100]
    chains = 1 + right.cumprod(1).sum(1).mean().item()
    rounds, _ = expected_rounds(right, torch.zeros(100))
    assert 100 / rounds < chains


def test_what_is_not_finite_stays_so() -> None:
    rounds, _ = expected_rounds(torch.full((4, 2), torch.nan), torch.zeros(4))
    assert rounds != rounds
