"""Responses that are left out of a batch, advantages of the others, and groups in a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tlt.config import Config, parse_config
from tlt.rl.advantages import grpo
from tlt.rl.groups import from_plain, has_spread, is_comparable, make_batch, to_plain, usable
from tlt.types import Group, Prompt, Request, Response, SamplingParams

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
    assert batch.advantages == [*grpo([1.0, 0.0]), *grpo([2.0, 4.0])]
    assert batch.rewards == [[1.0, 0.0], [2.0, 4.0]]


def test_groups_are_restored_from_json_bit_for_bit() -> None:
    groups = [group(3, 0.1 + 0.2, None, 1 / 3, lengths=[1, 4, 9]), group(1, 1e-300, -2.0)]
    groups[0].responses[0].old_logprobs = [-0.1 / 3]
    plain = json.loads(json.dumps(to_plain(groups)))
    assert from_plain(plain, PROMPTS, SAMPLING) == groups
    assert "prompt 3" not in json.dumps(plain)  # prompts are read again from their source
