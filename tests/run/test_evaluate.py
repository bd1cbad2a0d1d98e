"""mean@k and pass@k by hand and by enumeration, and the seeds of evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest

from tlt.config import parse_config
from tlt.run.train import evaluate, is_solved, pass_at, summary_of
from tlt.sampling import request_seed
from tlt.types import Prompt, Request, Response, RolloutStats, SamplingParams

PROMPTS = [Prompt(i, f"prompt {i}", (i,)) for i in range(3)]


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(n: int) -> None:
    for right in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([i < right for i in range(n)], k))
            assert pass_at(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def respond(rewards: Sequence[float | None], length: int = 2, reason: str = "stop") -> list[Response]:
    request = Request(PROMPTS[0], 0, 0, 0, SamplingParams())
    return [Response(request, [1] * length, [], [], reason, reward=reward) for reward in rewards]


def test_a_summary_by_hand() -> None:
    groups = [respond([1.0, 0.0, 0.5, 0.0]), respond([0.0] * 4, length=6, reason="length")]
    assert summary_of(groups, samples=4, solved=1.0) == pytest.approx(
        {
            "mean@4": 1.5 / 8,
            "pass@1": 0.125,  # a quarter and none
            "pass@2": 0.25,  # 1 - C(3, 2) / C(4, 2) = 0.5, and none
            "pass@4": 0.5,
            "half_width": 1.96 * 0.1875,  # means of 0.375 and 0: deviation 0.375 / sqrt(2), divided by sqrt(2)
            "length_mean": 4.0,
            "length_max": 6,
            "truncated": 0.5,
            "without_reward": 0,
        }
    )


def test_responses_without_a_reward_are_left_out_and_counted() -> None:
    found = summary_of([respond([1.0, None, 1.0]), respond([0.0, 1.0, 1.0])], samples=3, solved=1.0)
    assert found["without_reward"] == 1
    assert found["mean@3"] == pytest.approx(4 / 5)
    assert found["pass@1"] == pytest.approx((1 + 2 / 3) / 2)
    assert found["pass@3"] == 1.0  # of the one prompt that has three
    nothing = summary_of([respond([None, None])], samples=2, solved=1.0)
    assert nothing == {"length_mean": 2.0, "length_max": 2, "truncated": 0.0, "without_reward": 2}, "there is no mean"


class Fake:
    """Rollout that decodes in any order. A response's reward is its index."""

    def __init__(self, shuffle: int) -> None:
        self.shuffle = random.Random(shuffle)
        self.requests: list[Request] = []

    def generate(
        self, requests: Sequence[Request], on_response: Callable[[Response], None], coming: Any = ()
    ) -> tuple[list[Response], RolloutStats]:
        self.requests += requests
        responses = [Response(r, [0] * (r.index + 1), [], [], "stop") for r in requests]
        self.shuffle.shuffle(responses)
        return responses, RolloutStats()

    def submit(self, response: Response) -> None: ...

    def close(self) -> None: ...

    def __call__(self, responses: Sequence[Response]) -> None:
        for response in responses:
            response.reward = float(response.request.index == 0 and response.request.prompt.prompt_id == 1)

    def phase(self, step: int, name: str, total: int) -> None:
        assert (step, name, total) == (7, "eval", 6)

    def response(self, response: Response) -> None: ...


def run(shuffle: int) -> tuple[dict[str, float], Fake]:
    sections = {"reward": {"name": "exact"}, "eval": {"every": 1, "samples": 2, "path": "-"}, "run": {"seed": 9}}
    config = parse_config({"model": {"path": "-"}, "data": {"path": "-"}} | sections)
    fake = Fake(shuffle)
    return evaluate(config, PROMPTS, fake, fake, SamplingParams(), fake, 7), fake


def test_the_order_of_arrival_has_no_effect() -> None:
    found, _ = run(0)
    assert (found["mean@2"], found["pass@1"], found["pass@2"]) == pytest.approx((1 / 6, 1 / 6, 1 / 3))
    assert all(run(shuffle)[0] == found for shuffle in range(1, 5))


def test_evaluations_have_seeds_of_their_own_which_never_change() -> None:
    _, fake = run(0)
    assert [r.seed for r in fake.requests] == [request_seed(9, "eval", p, 0, i) for p in range(3) for i in range(2)]
    training = {request_seed(9, "train", p, epoch, i) for p in range(3) for epoch in range(2) for i in range(2)}
    assert not training & {r.seed for r in fake.requests}


def test_a_sum_that_is_right_except_for_rounding_counts_as_right() -> None:
    assert 0.6 + 0.3 + 0.1 < 1.0
    assert is_solved(0.6 + 0.3 + 0.1, 1.0)
    assert not is_solved(0.999, 1.0)
    assert is_solved(-0.5, -0.5)
