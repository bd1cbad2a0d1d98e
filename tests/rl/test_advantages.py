"""GRPO's advantages against numbers worked by hand and against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt.rl.advantages import grpo

REWARDS = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=16)


def test_two_of_four_right() -> None:
    # mean 1/2; deviations +-1/2, squares sum to 1; the root of 1 / (4 - 1) is 0.577350; 0.5 / 0.577351 = 0.866024
    assert grpo([1.0, 0.0, 0.0, 1.0]) == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)


def test_one_of_four_right() -> None:
    # mean 1/4; squares 9/16 + 3/16 = 3/4; / 3 = 1/4, root 1/2; 0.75 / 0.500001 = 1.499997, -0.25 / 0.500001 = -0.499999
    assert grpo([0.0, 0.0, 1.0, 0.0]) == pytest.approx([-0.499999, -0.499999, 1.499997, -0.499999], abs=1e-6)


def test_three_marks() -> None:
    # mean 2, deviations -1, 0, 1; squares sum to 2, / 2 = 1, root 1; 1 / 1.000001
    assert grpo([1.0, 2.0, 3.0]) == pytest.approx([-1 / 1.000001, 0.0, 1 / 1.000001], abs=1e-12)


@given(st.floats(-1e6, 1e6), st.integers(2, 64))
def test_equal_rewards_give_exactly_zero(reward: float, count: int) -> None:
    assert grpo([reward] * count) == [0.0] * count


@given(REWARDS)
def test_deviation_is_that_of_torch(rewards: list[float]) -> None:
    x = torch.tensor(rewards, dtype=torch.float64)
    assert grpo(rewards) == pytest.approx(((x - x.mean()) / (x.std() + 1e-6)).tolist(), rel=1e-6, abs=1e-6)


@given(REWARDS)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    advantages = grpo(rewards)
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    by_reward = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert [advantages[i] for i in by_reward] == sorted(advantages)
