"""Advantages against numbers worked by hand."""

from __future__ import annotations

from typing import get_args

import pytest

from tlt.config import TrainConfig
from tlt.rl.advantages import ADVANTAGES, EPSILON, OF_ONE_GROUP, WITH_BATCH_MEAN, grpo_batch, reinforce_pp


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
        ("dr_grpo", [[1.0, 0.0], [0.0, 1.0, 5.0]], [[0.5, -0.5], [-2.0, -1.0, 3.0]]),
        (
            "rloo",
            [[1.0, 0.0], [0.0, 1.0, 5.0]],
            [[1.0, -1.0], [-3.0, -1.5, 4.5]],
        ),  # the mean of the others: 3, 2.5, 0.5
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


@pytest.mark.parametrize("name", ADVANTAGES)
def test_which_advantages_depend_on_one_group(name: str) -> None:
    """The others must not be computed before all groups are known."""
    group, alike, others = [0.0, 1.0, 0.5], [1.0, 1.0], [[5.0, -3.0], [9.0, 2.0, 1.0]]
    alone, among = ADVANTAGES[name]([group], EPSILON)[0], ADVANTAGES[name]([group, *others], EPSILON)[0]
    assert (alone == pytest.approx(among)) == (name in OF_ONE_GROUP)
    is_zero = not any(ADVANTAGES[name]([alike, *others], EPSILON)[0])
    assert is_zero == (name not in WITH_BATCH_MEAN)
