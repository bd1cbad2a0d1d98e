"""Groups, their advantages, and the training batch."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from tlt.config import Config, TrainConfig, parse_config
from tlt.rl.groups import (
    ADVANTAGES,
    from_plain,
    grpo,
    grpo_batch,
    has_spread,
    is_comparable,
    make_batch,
    reinforce_pp,
    to_plain,
    usable,
)
from tlt.types import Group, Prompt, Request, Response, SamplingParams

EPSILON = 1e-6
SAMPLING = SamplingParams(temperature=0.7)
PROMPTS = [Prompt(row, f"prompt {row}", (row, 7)) for row in range(5)]


def make_config(**sections: Any) -> Config:
    rollout = {"max_new_tokens": 10} | sections.pop("rollout", {})
    tree = {"model": {"path": "-"}, "data": {"path": "-"}, "reward": {"name": "exact"}, "rollout": rollout}
    return parse_config(tree | sections)


def group(row: int, *rewards: float | None, lengths: list[int] | None = None) -> Group:
    """Return a group. Response i of prompt r has tokens 10 r + i. `lengths` are the numbers of tokens (default 3)."""
    responses = []
    for i, (reward, length) in enumerate(zip(rewards, lengths or [3] * len(rewards), strict=True)):
        request = Request(PROMPTS[row], i, 2, 2**63 + 100 * row + i, SAMPLING)
        tokens, logprobs = [10 * row + i] * length, [-0.1 * (i + 1)] * length
        outcome = "timeout" if reward is None else ""
        responses.append(Response(request, tokens, [-9.0] * length, logprobs, "stop", "té\ud800xt", reward, outcome))
    return Group(PROMPTS[row], responses)


@pytest.mark.parametrize(
    ("rewards", "comparable", "spread"),
    [
        ((1.0, 0.0), True, True),
        ((0.5, 0.5, 0.5), True, False),
        ((None, 1.0, 0.0), True, True),
        ((None, 1.0, 1.0), True, False),  # the missing one is not a 0
        ((None, 1.0), False, False),
        ((None, None), False, False),
    ],
)
def test_comparable_and_spread_by_hand(rewards: tuple[float | None, ...], comparable: bool, spread: bool) -> None:
    given = group(0, *rewards)
    assert is_comparable(given) is comparable
    assert has_spread(given) is spread
    assert usable([given], make_config()) == [given] * comparable
    assert usable([given], make_config(rollout={"max_waves": 2})) == [given] * spread


@pytest.mark.parametrize(("masks", "masked"), [(False, set()), (True, {1, 2})])
def test_truncated_responses_count_in_advantages_but_are_masked(masks: bool, masked: set[int]) -> None:
    groups = [group(0, 1.0, None, 0.0), group(1, 2.0, 4.0)]
    for response in (groups[0].responses[1], groups[0].responses[2], groups[1].responses[0]):
        response.finish_reason = "length"
    batch = make_batch(groups, make_config(train={"mask_truncated": masks}))
    assert batch.masked == masked
    assert batch.advantages == [*grpo([1.0, 0.0], EPSILON), *grpo([2.0, 4.0], EPSILON)]
    assert batch.rewards == [[1.0, 0.0], [2.0, 4.0]]


def test_groups_are_restored_from_json_bit_for_bit() -> None:
    groups = [group(3, 0.1 + 0.2, None, 1 / 3, lengths=[1, 4, 9]), group(1, 1e-300, -2.0)]
    groups[0].responses[0].old_logprobs = [-0.1 / 3]
    plain = json.loads(json.dumps(to_plain(groups)))
    assert from_plain(plain, PROMPTS, SAMPLING) == groups
    assert "prompt 3" not in json.dumps(plain)  # prompts are read again from their source


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
