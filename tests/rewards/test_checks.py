"""A first step with equal rewards is explained."""

from __future__ import annotations

import pytest

from tlt.config import parse_config
from tlt.rewards import make_reward
from tlt.rewards.checks import warn_if_alike
from tlt.types import Group, Prompt, Request, Response, SamplingParams

PROMPT = Prompt(5, "What is 6 x 7?", (1,), {"answer": "42"})


def rewarded(terms: list[dict[str, object]], *texts: str, marker: str = "Answer:") -> str:
    """Return the log of a step with these responses, of which the last one was cut off."""
    reward = {"terms": terms, "answer_marker": marker}
    config = parse_config({"model": {"path": "-"}, "data": {"path": "-"}, "reward": reward})
    request = Request(PROMPT, 0, 0, 0, SamplingParams())
    responses = [Response(request, [1] * len(text), [], [], "stop", text) for text in texts]
    responses[-1].finish_reason = "length"
    make_reward(config, [PROMPT])(responses)
    warn_if_alike([Group(PROMPT, responses[:1]), Group(PROMPT, responses[1:])], config.reward)
    return responses[0].answer


TERMS = [{"name": "exact"}, {"name": "length", "length_from": 50, "length_to": 90}]


def test_a_first_step_of_equal_rewards_shows_what_each_term_compared(caplog: pytest.LogCaptureFixture) -> None:
    rewarded(TERMS, "short", "the answer is 42", "a long one that does not end by itself")
    assert caplog.messages == [
        "all 3 rewards of the first step are 0, so the policy learns nothing. Example:\n"
        "  prompt 5: 'What is 6 x 7?'\n"
        "  response, which ended by itself: 'the answer is 42'\n"
        "  exact: score 0, from the answer '' (the response has no 'Answer:') and the data's answer '42'\n"
        "  length: score 0, from 16 tokens"
    ]


def test_rewards_that_differ_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert rewarded(TERMS, "Answer: 42", "Answer: 41") == "42"
    assert caplog.messages == []


def test_a_marker_is_found_without_its_last_space(caplog: pytest.LogCaptureFixture) -> None:
    rewarded([{"name": "exact"}], "Answer:\n41", "Answer: 40", marker="Answer: ")
    assert "the response has no" not in caplog.text
    assert "exact: score 0, from the answer '41' and the data's answer '42'" in caplog.text


@pytest.mark.parametrize(
    ("term", "said"),
    [
        ({"name": "exact"}, "exact: score 0, from the answer '41' and the data's answer '42'"),
        ({"name": "math"}, "math: score 0, from the answer '41' and the data's answer '42'"),
        ({"name": "format", "pattern": "^no"}, "format: score 0, from the pattern '^no' and the whole response"),
        ({"name": "length", "length_from": 1, "length_to": 9}, "length: score -1, from 10 tokens"),
    ],
)
def test_each_term_shows_what_it_compared(term: dict[str, object], said: str, caplog: pytest.LogCaptureFixture) -> None:
    """All other terms have equal scores as well, and the lengths are the same."""
    rewarded([term], "Answer: 41", "Answer: 40")
    (message,) = caplog.messages
    assert message.endswith(f"\n  {said}")
