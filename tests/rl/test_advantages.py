"""Advantages against numbers worked by hand, against torch, and against an enumerated policy gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt.config import TrainConfig
from tlt.rl.advantages import (
    ADVANTAGES,
    EPSILON,
    OF_ONE_GROUP,
    WITH_BATCH_MEAN,
    dr_grpo,
    grpo,
    grpo_batch,
    reinforce_pp,
    rloo,
)

REWARDS = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=16)


@given(REWARDS)
def test_the_deviation_is_that_of_torch(rewards: list[float]) -> None:
    x = torch.tensor(rewards, dtype=torch.float64)
    assert grpo(rewards) == pytest.approx(((x - x.mean()) / (x.std() + 1e-6)).tolist(), rel=1e-6, abs=1e-6)
    assert grpo([rewards[0]] * len(rewards)) == [0.0] * len(rewards), "exactly"


def test_the_configuration_knows_every_advantage() -> None:
    assert set(get_args(TrainConfig.model_fields["advantage"].annotation)) == set(ADVANTAGES)


def test_advantage_epsilon_is_added_to_the_deviation() -> None:
    assert ADVANTAGES["grpo"]([[1.0, 2.0, 3.0]], 1.0) == [[-0.5, 0.0, 0.5]]
    assert grpo_batch([[1.0, 0.0], [0.0, 0.0]], 0.5)[0] == [0.5, -0.5]
    assert reinforce_pp([[1.0, 0.0], [0.0, 0.0]], 1.0)[0] == pytest.approx([0.5, -1 / 6])


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        # mean 1/4; squares 9/16 + 3/16 = 3/4; / 3 = 1/4, root 1/2
        ("grpo", [[0.0, 0.0, 1.0, 0.0]], [[-0.5, -0.5, 1.5, -0.5]]),
        ("reinforce_pp", [[1.0, 0.0], [0.0, 0.0]], [[1.5, -0.5], [-0.5, -0.5]]),  # not zero in a group of equal rewards
        ("grpo", [[1.0, 0.0], [0.0, 3.0]], [[0.707106, -0.707106], [-0.707106, 0.707106]]),
        ("grpo_batch", [[1.0, 0.0], [0.0, 3.0]], [[0.353553, -0.353553], [-1.060660, 1.060660]]),  # by 1.414214
        ("dr_grpo", [[1.0, 0.0], [0.0, 3.0]], [[0.5, -0.5], [-1.5, 1.5]]),
        ("rloo", [[1.0, 0.0], [0.0, 3.0]], [[1.0, -1.0], [-3.0, 3.0]]),
        # five rewards, mean 2; squares 4 + 1 + 0 + 1 + 4 = 10, / 4 = 2.5, root 1.581139
        ("reinforce_pp", [[0.0, 1.0], [2.0, 3.0, 4.0]], [[-1.264911, -0.632456], [0.0, 0.632456, 1.264911]]),
        # mean 1; squares 0 + 1 + 1 + 4, / 3, root 1.414214
        ("reinforce_pp", [[1.0, 0.0], [0.0, 3.0]], [[0.0, -0.707107], [-0.707107, 1.414214]]),
    ],
)
def test_advantages_by_hand(name: str, rewards: list[list[float]], expected: list[list[float]]) -> None:
    for found, group in zip(ADVANTAGES[name](rewards, EPSILON), expected, strict=True):
        assert found == pytest.approx(group, abs=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_rollout_without_spread_or_without_groups_has_no_advantages(name: str) -> None:
    assert ADVANTAGES[name]([[0.1] * 3, [0.1] * 7], EPSILON) == [[0.0] * 3, [0.0] * 7]
    assert ADVANTAGES[name]([], EPSILON) == []


@pytest.mark.parametrize("name", ["grpo", "grpo_batch", "reinforce_pp"])
def test_an_epsilon_of_zero(name: str) -> None:
    """Equal rewards give zeros, and a scale of the rewards has no effect, even if a square would be 0 or infinite."""
    assert ADVANTAGES[name]([[0.1] * 3, [0.1] * 7], 0.0) == [[0.0] * 3, [0.0] * 7]
    (plain, *_), *others = (ADVANTAGES[name]([[scale, 0.0], [0.0, 0.0]], 0.0) for scale in (1.0, 1e-300, 1e300))
    assert all(found == pytest.approx(plain) for found, *_ in others)
    smallest = ADVANTAGES[name]([[5e-324] + [0.0] * 7] * 2, 0.0)
    assert all(abs(a) < 16 for group in smallest for a in group)


@pytest.mark.parametrize(("advantage", "share"), [(rloo, 1.0), (dr_grpo, 2 / 3)])
def test_the_mean_is_the_policy_gradient(advantage: Callable[[Sequence[float]], list[float]], share: float) -> None:
    """Four actions and groups of three, all 64 weighted by their probability. RLOO is unbiased, and Dr. GRPO is too
    small by (n - 1) / n."""
    scores = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    worth = [1.0, -0.5, 0.25, 2.0]
    log_p = torch.log_softmax(scores, -1)
    (expected,) = torch.autograd.grad((log_p.exp() * torch.tensor(worth)).sum(), scores, retain_graph=True)
    surrogate = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(4), repeat=3):
        chance = log_p[list(group)].sum().exp().detach()
        advantages = torch.tensor(advantage([worth[a] for a in group]), dtype=torch.float64)
        surrogate = surrogate + chance * (advantages * log_p[list(group)]).mean()
    (found,) = torch.autograd.grad(surrogate, scores)
    assert torch.allclose(found, share * expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_which_advantages_depend_on_one_group(name: str) -> None:
    """The others must not be computed before all groups are known."""
    group, alike, others = [0.0, 1.0, 0.5], [1.0, 1.0], [[5.0, -3.0], [9.0, 2.0, 1.0]]
    alone, among = ADVANTAGES[name]([group], EPSILON)[0], ADVANTAGES[name]([group, *others], EPSILON)[0]
    assert (alone == pytest.approx(among)) == (name in OF_ONE_GROUP)
    is_zero = not any(ADVANTAGES[name]([alike, *others], EPSILON)[0])
    assert is_zero == (name not in WITH_BATCH_MEAN)
