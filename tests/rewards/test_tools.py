"""Functions as tools: the call formats of model families, and calls that cannot be carried out."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny_environments
from transformers.utils.chat_template_utils import get_json_schema

from tlt.config import Config, parse_config
from tlt.rewards import RewardError
from tlt.rewards.environments import Environments, Turn
from tlt.rewards.isolated import IsolatedScore
from tlt.rewards.tools import Tools, calls_in, parsed, with_tools
from tlt.rewards.verdicts import Verdict
from tlt.types import Prompt

ADD = ("add", {"first": 2, "second": 3})
PROMPT = Prompt(0, "?", (1,), {"answer": "5"})


@pytest.mark.parametrize(
    "text",
    [
        # Qwen 2.5, Qwen 3, Hermes
        '<tool_call>\n{"name": "add", "arguments": {"first": 2, "second": 3}}\n</tool_call>',
        'I add.\n<tool_call>{"name": "add", "arguments": {"first": 2, "second": 3}}</tool_call>\n',
        # the turn ended before the tag did
        '<tool_call>{"name": "add", "arguments": {"first": 2, "second": 3}}',
        # Llama 3
        '{"name": "add", "parameters": {"first": 2, "second": 3}}',
        # Mistral
        '[{"name": "add", "arguments": {"first": 2, "second": 3}}]',
        # a call in the reasoning is none
        '<think>{"name": "add"} or <tool_call>no</tool_call>?</think>\n{"name": "add", "parameters": '
        '{"first": 2, "second": 3}}',
    ],
)
def test_the_call_format_of_each_family_is_read(text: str) -> None:
    assert [parsed(call) for call in calls_in(text)] == [ADD]


def test_parameters_in_tags_are_texts() -> None:
    """The format of Qwen3-Coder. One line break after the open tag and one before the closing tag belong to it."""
    text = "<tool_call>\n<function=add>\n<parameter=first>\n2\n</parameter>\n<parameter=second>\n3\n</parameter>\n"
    text += "</function>\n</tool_call>"
    assert [parsed(call) for call in calls_in(text)] == [("add", {"first": "2", "second": "3"})]
    assert desk(text) == ("5", False, 0.0)
    call = "<function=add><parameter=first>\n\n a\n\n\n</parameter>\n</function>"
    assert parsed(call) == ("add", {"first": "\n a\n\n"})


@pytest.mark.parametrize(("table", "found"), [('{"é": "ä"}', "ä"), ("null", "e")])
def test_a_parameter_in_tags_is_read_as_json_if_its_type_is_not_text(table: str, found: str) -> None:
    call = f"<function=look_up><parameter=word>é</parameter><parameter=table>\n{table}\n</parameter></function>"
    assert desk(f"<tool_call>{call}</tool_call>") == (f'{{"found": "{found}"}}', False, 0.0)


@pytest.mark.parametrize("text", ["5", "", '{"answer": 5}', "<think><tool_call>{}</tool_call></think>5", "[5]"])
def test_an_answer_is_not_a_call(text: str) -> None:
    assert calls_in(text) == []


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
        ("", "the call is not JSON"),
        ("[" * 100_000, "the call is not JSON"),
        ("5", 'a call is a JSON object with "name" and "arguments"'),
        ('{"name": 7, "arguments": {}}', 'a call is a JSON object with "name" and "arguments"'),
        ('{"name": "add", "arguments": [2, 3]}', 'a call is a JSON object with "name" and "arguments"'),
        ('{"name": "multiply", "arguments": {}}', "there is no tool 'multiply': the tools are add, look_up"),
        ('{"name": "score", "arguments": {}}', "there is no tool 'score'"),
        ('{"name": "add", "arguments": {"first": 2}}', "add: missing a required argument: 'second'"),
        ('{"name": "add", "arguments": {"first": 2, "second": 3, "third": 4}}', "unexpected keyword argument 'third'"),
        ('{"name": "add", "arguments": {"first": "two", "second": 3}}', "add: first: Input should be a valid integer"),
        ('{"name": "look_up", "arguments": {"word": "e", "table": [1]}}', "look_up: table: Input should be"),
        ('{"name": "look_up", "arguments": {"word": "\\ud83d"}}', "the call has a lone surrogate"),
        ("<function=add><parameter=first>2</function>", "add: missing a required argument: 'first'"),
    ],
)
def test_a_malformed_call_is_counted_and_answered_with_its_error(call: str, error: str) -> None:
    environments = Environments(tiny_environments.Desk, 5.0)
    texts = (f"<tool_call>{call}</tool_call>", "it is 5")
    (found,) = environments.answer_all([(PROMPT, Turn(1, 1, texts[:1]))])
    assert found.reply.startswith("Error: ")
    assert error in found.reply
    assert found.scores == {"tool_calls": 1, "malformed_calls": 1, "failed_calls": 0}
    (found,) = environments.answer_all([(PROMPT, Turn(1, 1, texts))])
    assert (found.reply, found.reward) == (None, 1.0), "the episode goes on"
    assert found.scores["malformed_calls"] == 1, "of the whole episode"


def test_a_bare_call_may_be_malformed_and_a_long_name_takes_little_room() -> None:
    for call, said in (
        ('[{"name": ' + "[" * 100_000 + "]" * 100_000 + "}]", "Error: the call is not JSON"),
        (json.dumps({"name": "x" * 10_000, "arguments": {}}), f"Error: there is no tool '{'x' * 99}: the tools are"),
    ):
        reply, done, _ = desk(call)
        assert (reply[: len(said)], done) == (said, False)


def test_a_tool_that_raises_is_counted_separately() -> None:
    made = tiny_environments.Desk()
    made.reset(PROMPT)
    assert made.step('{"name": "look_up", "parameters": {"word": "x"}}') == ("Error: KeyError: 'x'", False, 0.0)
    assert made.scores == {"tool_calls": 1, "malformed_calls": 0, "failed_calls": 1}


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
    assert found.reply.startswith("Error: ValueError")


def config(name: str, **data: Any) -> Config:
    reward = {"environment": f"tiny_environments:{name}", "folder": "tests"}
    return parse_config({"model": {"path": "-"}, "data": {"path": "-", "chat": True} | data, "reward": reward})


def test_the_chat_template_receives_the_tools() -> None:
    schemas = [get_json_schema(function) for function in tiny_environments.Desk.tools]
    assert with_tools(config("Desk")).data.chat_arguments == {"tools": schemas}
    own = config("Desk", chat_arguments={"tools": []})
    assert with_tools(own) is own, "the recipe has them"
    plain = config("Desk", chat=False)
    assert with_tools(plain) is plain, "there is no template"
    assert with_tools(config("Echo")).data.chat_arguments == {}


def test_tools_that_cannot_be_read_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Verdict(None, "timeout", "no answer in 10 s")
    monkeypatch.setattr(IsolatedScore, "score_all", lambda self, asked: [late] * (len(asked) == 1))
    with pytest.raises(RewardError, match="Desk' cannot be read \\(no answer in 10 s\\): correct the environment"):
        with_tools(config("Desk"))


def test_a_function_without_a_description_and_a_class_without_a_score_are_refused() -> None:
    with pytest.raises(RewardError, match="because it has no docstring"):
        with_tools(config("Undescribed"))
    made = Tools()
    made.reset(PROMPT)
    with pytest.raises(NotImplementedError, match=r"Tools needs a method score\(prompt, answer\)"):
        made.step("5")
