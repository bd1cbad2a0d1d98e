"""Lengths and shares of episodes, worked by hand. Tokens of an environment's replies do not count."""

from __future__ import annotations

from typing import Any

import pytest

from tlt.config import parse_config
from tlt.loop import _compared
from tlt.rewards.verdicts import warn_if_alike
from tlt.rl.groups import make_batch
from tlt.rl.measure import episodes_of, measure, tokens_of
from tlt.run.record import record
from tlt.run.train import summary_of
from tlt.types import Group, Prompt, Reply, Request, Response, RolloutStats, SamplingParams

PROMPT = Prompt(0, "a question", (1, 2, 3))
WHOLE, WRITTEN = [10, 9, 12, 11], [6, 5, 12, 7]
"""tokens of each episode, and those of them that the model wrote"""


def episodes(*rewards: float) -> list[Response]:
    """Return four episodes. The first two end by themselves, after two turns each; the second begins with a text. The
    others reached rollout.max_new_tokens."""
    replies = [[Reply(3, 7, "four")], [Reply(0, 3, "two"), Reply(5, 6, "!")], [], [Reply(4, 8, "four")]]
    reasons = ["stop", "turns", "length", "reply"]
    responses = []
    for index, (length, ended, reason) in enumerate(zip(WHOLE, replies, reasons, strict=True)):
        request = Request(PROMPT, index, 0, index, SamplingParams(max_new_tokens=12, continues=True))
        logprobs = [-1.0] * length
        responses.append(Response(request, [7] * length, logprobs, logprobs, reason, "text", replies=ended))
    for response, reward in zip(responses, rewards, strict=False):
        response.reward = reward
    return responses


def config(**sections: Any) -> Any:
    rollout = {"max_new_tokens": 12}
    reward = {"environment": "game:Game", "turns": 2}
    tree = {"model": {"path": "-"}, "data": {"path": "-"}, "reward": reward, "rollout": rollout}
    return parse_config(tree | sections)


def test_metrics_of_a_step() -> None:
    group = Group(PROMPT, episodes(1.0, 0.0, 0.0, 0.0))
    found = measure(0, [group], RolloutStats(tokens=30, row_passes=10), {}, {}, {"total": 9.0, "rollout": 5.0})
    assert found.lengths == {"mean": 7.5, "median": 7, "p99": 12, "max": 12, "truncated": 0.5}
    assert episodes_of(group.responses) == {
        "turns": 1.75,
        "reply_tokens": 3.0,
        "ended": {"stop": 1, "turns": 1, "length": 1, "reply": 1},
    }
    assert (found.tokens_per_second, found.accept_length) == (6.0, 3.0)
    assert tokens_of([group]) == 4 * 3 + 30


def test_metrics_of_an_evaluation_and_of_a_comparison() -> None:
    responses = episodes(1.0, 0.0, 0.0, 0.0)
    found = summary_of([responses], samples=4, solved=1.0)
    assert (found["length_mean"], found["length_max"], found["truncated"]) == (7.5, 12, 0.5)
    assert _compared(responses, responses) == {"tokens": 30, "responses": 4, "differ": 0}


def test_an_episode_that_had_all_its_turns_is_trained_on() -> None:
    batch = make_batch([Group(PROMPT, episodes(1.0, 0.0, 0.0, 1.0))], config(train={"mask_truncated": True}))
    assert batch.masked == {2, 3}
    assert [batch.num_sampled(i) for i in range(4)] == WRITTEN
    assert [len(logprobs) for logprobs in batch.rollout_logprobs] == WRITTEN


def test_what_is_recorded_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    responses = episodes(0.0, 0.0, 0.0, 0.0)
    assert [record(response)["length"] for response in responses] == WRITTEN
    warn_if_alike([Group(PROMPT, responses[1:])])
    assert "all 3 rewards of the first step are 0" in caplog.text
    assert caplog.messages[-1].endswith("the response …'text' ended by 'turns'"), "an environment reads no answer"
