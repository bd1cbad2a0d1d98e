"""Functions as tools: the call formats of model families, and calls that cannot be carried out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny_environments
from transformers.utils.chat_template_utils import get_json_schema

from tlt.config import Config, parse_config
from tlt.environments.instances import Environments, Turn, TurnText
from tlt.environments.tools import Tools, with_tools
from tlt.rewards import RewardError
from tlt.rewards.isolated import IsolatedScore
from tlt.rewards.verdicts import Verdict
from tlt.types import Prompt

PROMPT = Prompt(0, "?", (1,), {"answer": "5"})


@pytest.mark.parametrize(("table", "found"), [('{"é": "ä"}', "ä"), ("null", "e")])
def test_a_parameter_in_tags_is_read_as_json_if_its_type_is_not_text(table: str, found: str) -> None:
    call = f"<function=look_up><parameter=word>é</parameter><parameter=table>\n{table}\n</parameter></function>"
    assert desk(f"<tool_call>{call}</tool_call>") == (f'{{"found": "{found}"}}', False, 0.0)


def test_results_name_their_calls() -> None:
    """The messages are the turn with its calls, and a result for each. Ids are counted if the model wrote none."""
    made = tiny_environments.Desk()
    made.reset(PROMPT)
    turn = TurnText(
        "x", '<tool_call>{"name": "add", "arguments": {"first": 2, "second": 3}}</tool_call><tool_call>{</tool_call>'
    )
    for number in (1, 3):
        reply, done, _ = made.step(turn)
        own, first, second = reply.messages  # type: ignore[attr-defined]
        ids = [f"{number + i:09}" for i in range(2)]
        assert [call["id"] for call in own["tool_calls"]] == ids
        assert [call["function"]["name"] for call in own["tool_calls"]] == ["add", "unknown"]
        assert first == {"role": "tool", "name": "add", "tool_call_id": ids[0], "content": "5"}
        assert second["tool_call_id"] == ids[1]
        assert (reply, done) == (f"5\n{second['content']}", False)
    assert made.scores == {"tool_calls": 4, "malformed_calls": 2, "failed_calls": 0}


def test_the_answer_is_scored_without_special_tokens() -> None:
    assert desk(TurnText("it is 5", "it is 5<eos>")) == ("", True, 1.0)


def test_calls_of_one_turn_are_carried_out_in_order() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"first": %d, "second": 1}}</tool_call>'
    assert desk(call % 1 + call % 2) == ("2\n3", False, 0.0)
    found = desk('[{"name": "add", "arguments": {"first": 1, "second": 1}}, {"name": "look_up", "arguments": '
                 '{"word": "é"}}, {"name": "look_up", "arguments": {"word": "a", "table": {"a": "ä"}}}]')  # fmt: skip
    assert found == ('2\n{"found": "e"}\n{"found": "ä"}', False, 0.0)


def desk(*texts: str) -> tuple[str, bool, float]:
    made = tiny_environments.Desk()
    made.reset(PROMPT)
    return [made.step(text) for text in texts][-1]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("add(2, 3)", "the call is not JSON"),
        ('{"name": "multiply", "arguments": {}}', "there is no tool 'multiply': the tools are add, look_up"),
        ('{"name": "score", "arguments": {}}', "there is no tool 'score'"),
        ('{"name": "add", "arguments": {"first": 2}}', "add: missing a required argument: 'second'"),
        ('{"name": "add", "arguments": {"first": 2, "second": 3, "third": 4}}', "unexpected keyword argument 'third'"),
        ('{"name": "add", "arguments": {"first": "two", "second": 3}}', "add: first: Input should be a valid integer"),
        ('{"name": "look_up", "arguments": {"word": "e", "table": [1]}}', "look_up: table: Input should be"),
        ("<function=look_up><parameter=word>é</parameter><parameter=table>{}</function>", "outside its arguments"),
    ],
)
def test_a_malformed_call_is_counted_and_answered_with_its_error(call: str, error: str) -> None:
    environments = Environments(tiny_environments.Desk, 5.0)
    texts = (f"<tool_call>{call}</tool_call>", "it is 5")
    (found,) = environments.answer_all([(PROMPT, Turn(1, 1, texts[:1]))])
    _, message = found.reply
    assert message["content"].startswith("Error: ")
    assert error in message["content"]
    assert found.scores == {"tool_calls": 1, "malformed_calls": 1, "failed_calls": 0}
    (found,) = environments.answer_all([(PROMPT, Turn(1, 1, texts))])
    assert (found.reply, found.reward) == (None, 1.0), "the episode goes on"
    assert found.scores["malformed_calls"] == 1, "of the whole episode"


def test_a_long_name_takes_little_room() -> None:
    reply, done, _ = desk(json.dumps({"name": "x" * 10_000, "arguments": {}}))
    said = f"Error: there is no tool '{'x' * 99}: the tools are"
    assert (reply[: len(said)], done) == (said, False)


def test_a_tool_that_raises_is_counted_separately() -> None:
    made = tiny_environments.Desk()
    made.reset(PROMPT)
    assert made.step('{"name": "look_up", "parameters": {"word": "x"}}') == ("Error: KeyError: 'x'", False, 0.0)
    assert made.scores == {"tool_calls": 1, "malformed_calls": 0, "failed_calls": 1}


async def next_number(first: int) -> int:
    numbers.append(await asyncio.wait_for(asyncio.sleep(0, first), 1))
    return numbers[-1] + 1


def decorated(first: int) -> Any:
    return next_number(first)


def of_numpy(first: int) -> Any:
    return np.int64(first + 1)


numbers: list[int] = []


@pytest.mark.parametrize("function", [next_number, decorated, of_numpy])
def test_the_model_gets_the_result_of_an_async_tool_and_of_one_without_json(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get an error, of which its author hears nothing."""
    monkeypatch.setattr(tiny_environments.Desk, "tools", (function,))
    call = json.dumps({"name": function.__name__, "arguments": {"first": 2}})
    for _ in range(2):
        assert desk(call) == ("3", False, 0.0)
    assert numbers == ([] if function is of_numpy else [2, 2])
    numbers.clear()


def echo(text: str) -> str:
    found = json.loads(text)
    if found[0] == "raise":
        raise ValueError(found[1])
    return found


@pytest.mark.parametrize("text", ['["\\ud800"]', '["raise", "\\ud800"]'])
def test_a_result_or_error_that_is_no_valid_text_is_a_failed_call(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that reads escapes makes half a surrogate pair out of valid text."""
    monkeypatch.setattr(tiny_environments.Desk, "tools", (echo,))
    call = json.dumps({"name": "echo", "arguments": {"text": text}})
    (found,) = Environments(tiny_environments.Desk, 5.0).answer_all([(PROMPT, Turn(1, 1, (call,)))])
    assert (found.outcome, found.scores["failed_calls"]) == ("", 1)
    assert found.reply[1]["content"].startswith("Error: ValueError")


def config(name: str, **data: Any) -> Config:
    reward = {"environment": f"tiny_environments:{name}", "folder": "tests"}
    return parse_config({"model": {"path": "-"}, "data": {"path": "-", "chat": True} | data, "reward": reward})


def test_the_chat_template_receives_the_tools() -> None:
    schemas = [get_json_schema(function) for function in tiny_environments.Desk.tools]
    assert with_tools(config("Desk")).data.chat_arguments == {"tools": schemas}
    same = config("Desk", chat_arguments={"tools": schemas})
    assert with_tools(same) == same
    with pytest.raises(RewardError, match=r"data.chat_arguments.tools would hide the tools of .*Desk': remove it"):
        with_tools(config("Desk", chat_arguments={"tools": []}))
    plain = config("Desk", chat=False)
    assert with_tools(plain) is plain, "there is no template"
    assert with_tools(config("Echo")).data.chat_arguments == {}


def test_tools_that_cannot_be_read_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Verdict(None, "timeout", "no answer in 10 s")
    monkeypatch.setattr(IsolatedScore, "score_all", lambda self, asked: [late] * (len(asked) == 1))
    with pytest.raises(RewardError, match="Desk' cannot be read \\(no answer in 10 s\\): correct the environment"):
        with_tools(config("Desk"))


class DeskWithMethod(tiny_environments.Desk):
    """Environment whose tool needs an instance, which no call of the model gives."""

    def looked_up(self, word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return word

    tools = (looked_up,)


def test_tools_without_a_description_or_with_one_name_and_a_class_without_a_score_are_refused() -> None:
    with pytest.raises(RewardError, match="because it has no docstring"):
        with_tools(config("Undescribed"))
    twice = type("Twice", (tiny_environments.Desk,), {"tools": (tiny_environments.add,) * 2})
    with pytest.raises(ValueError, match="Twice has several tools of the name add: rename all but one"):
        twice.schemas()
    with pytest.raises(ValueError, match=r"looked_up of DeskWithMethod cannot be called .*'self'.*: write a function"):
        DeskWithMethod.schemas()
    with pytest.raises(ValueError, match=r"Scoreless has no reward: give it a method score\(prompt, answer\)"):
        type("Scoreless", (Tools,), {"tools": (tiny_environments.add,)}).schemas()
