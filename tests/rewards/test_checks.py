"""A first step with equal rewards is explained."""

from __future__ import annotations

import pytest

from tlt.config import parse_config
from tlt.rewards import make_reward
from tlt.rewards.checks import warn_if_alike
from tlt.types import Group, Prompt, Request, Response, SamplingParams

PROMPT = Prompt(5, "What is 6 x 7?", (1,), {"answer": "42"})


def rewarded(*texts: str) -> None:
    """Log what is said of a step with these responses, of which the last one was cut off."""
    reward = {"name": "exact", "answer_marker": "Answer:"}
    config = parse_config({"model": {"path": "-"}, "data": {"path": "-"}, "reward": reward})
    request = Request(PROMPT, 0, 0, 0, SamplingParams())
    responses = [Response(request, [1] * len(text), [], [], "stop", text) for text in texts]
    responses[-1].finish_reason = "length"
    make_reward(config, [PROMPT])(responses)
    warn_if_alike([Group(PROMPT, responses[:1]), Group(PROMPT, responses[1:])])


def test_a_first_step_of_equal_rewards_shows_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    rewarded("Answer: 41", "the answer is 42", "a long one that does not end by itself")
    assert caplog.messages == [
        "all 3 rewards of the first step are 0, so the policy learns nothing; the response …'the answer is 42' has the "
        "answer '', and the data '42'"
    ]


def test_rewards_that_differ_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rewarded("Answer: 42", "Answer: 41")
    assert caplog.messages == []
