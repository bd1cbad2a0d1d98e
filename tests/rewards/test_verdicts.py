"""Verdicts of exceptions in users' code."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tlt
from tlt.config import parse_config
from tlt.rewards import make_reward
from tlt.rewards.verdicts import failed, warn_if_alike, warn_if_all_masked
from tlt.types import Group, Prompt, Request, Response, SamplingParams, TrainBatch

OURS, THEIRS = str(Path(tlt.__file__).parent), json.__file__


def raised(*files: str, code: str = "1 / 0") -> Exception:
    """Return an error that passed through the first line of each of these files, the innermost last."""
    call: Any = partial(exec, compile(code, files[-1], "exec"), {})
    for file in reversed(files[:-1]):
        call = partial(exec, compile("call()", file, "exec"), {"call": call})
    with pytest.raises((ZeroDivisionError, IndexError)) as caught:
        call()
    return caught.value.with_traceback(caught.tb.tb_next)


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ([f"{OURS}/rewards/score_pool.py", "/me/a.py", "/me/b.py", THEIRS], "/me/b.py:1: "),
        (["/me/a.py", "<string>"], "/me/a.py:1: "),
        ([f"{OURS}_of_mine/a.py"], f"{OURS}_of_mine/a.py:1: "),
        ([f"{OURS}/rewards/score_pool.py", THEIRS], ""),
    ],
)
def test_the_innermost_line_of_the_users_files_is_named(files: list[str], place: str) -> None:
    assert failed(raised(*files)).detail == f"{place}ZeroDivisionError: division by zero"


def test_a_traceback_is_printed_once_for_each_place_and_type(capsys: pytest.CaptureFixture[str]) -> None:
    for code in ("1 / 0", "[][0]", "1 / 0"):
        failed(raised("/me/printed.py", code=code))
    printed = capsys.readouterr().err
    assert [printed.count(name) for name in ("Traceback", "ZeroDivisionError", "IndexError")] == [2, 1, 1]


# -- a first step from which the policy cannot learn -------------------------------------------------------------------


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


@pytest.mark.parametrize("masked", [set(), {0}, {0, 1}])
def test_a_first_step_whose_responses_were_all_cut_off_is_named(
    masked: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_all_masked(TrainBatch([(1,)] * 2, [[2], [3]], [1.0, -1.0], [[], []], masked=masked))
    expected = ["all 2 responses of the first step were cut off, and train.mask_truncated leaves them out"]
    assert [message.partition(" of the update")[0] for message in caplog.messages] == expected * (len(masked) == 2)
    warn_if_all_masked(TrainBatch([], [], [], []))
    assert len(caplog.messages) == (len(masked) == 2), "without responses another message says why"
