"""An episode with tools, from tokens to tokens: the model reads its template applied to the whole conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_episodes import AtOnce
from tiny_environments import Desk
from tiny_templates import CALL_ENDS, QWEN3, family
from transformers.utils.chat_template_utils import get_json_schema

from tlt.config import Config, parse_config
from tlt.data.continuation import Call, calling
from tlt.data.prompts import encoder
from tlt.environments import make_turns
from tlt.environments.call_reader import CallReader
from tlt.rewards import RewardError
from tlt.types import Prompt, Request, Response, Row, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=2000, continues=True)
CALLS = [Call("add", {"first": 2, "second": 3}), Call("look_up", {"word": "é"}, "000000002")]


class InThisProcess(AtOnce):
    """Stand-in for a pool of processes."""

    def __init__(self, start: Any) -> None:
        super().__init__(dict)
        config, *_, opens = start.args
        answer_all, _ = opens(config, ())
        self.environments = SimpleNamespace(answer_all=answer_all)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.environments.ScorePool", InThisProcess)
    monkeypatch.setattr(Desk, "call_reader", CallReader())  # make_turns sets another one


def recipe() -> Config:
    tools = [get_json_schema(function) for function in Desk.tools]
    data = {"path": "-", "chat": True, "chat_arguments": {"tools": tools}}
    reward = {"environment": "tiny_environments:Desk", "folder": "tests"}
    return parse_config({"model": {"path": "-"}, "data": data, "reward": reward})


def said(row: Row, tokens: Sequence[int]) -> Response:
    everything = [*row.tokens, *tokens]
    zeros = [0.0] * len(everything)
    return Response(row.request, everything, zeros, zeros, "stop", replies=row.replies)


def played(name: str, folder: Path, resume: bool = False) -> tuple[list[int], list[int], Response]:
    """Play an episode in which the model calls a tool, then two tools if its template allows that, and answers. Return
    the tokens of prompt and response before the answer, those of the whole conversation, and the response."""
    config, tokenizer = recipe(), family(name)
    encode, end = encoder(tokenizer, config.data), CALL_ENDS[name]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2 + 3?"}]
    prompt = Prompt(0, "?", tuple(encode(messages)), {"answer": "5"}, messages=list(messages))
    turns = make_turns(config, tokenizer, folder / "reward.log")
    turns.record_replies(folder, resume)
    (row,) = turns.begin([Request(prompt, 0, 0, 7, SAMPLING)])
    finished: list[Response] = []
    for calls in (CALLS[:1], CALLS[: 1 + (name != "LLAMA3")]):
        before = encode(messages)
        contents = {"add": "5", "look_up": '{"found": "e"}'}
        number = sum(message["role"] == "tool" for message in messages)
        calls = [call._replace(id=f"{number + i:09}") for i, call in enumerate(calls, 1)]
        own = calling(*calls)
        whole = tokenizer.apply_chat_template([*messages, own], return_dict=False, **config.data.chat_arguments)
        # as the model writes the turn without reasoning: after the prompt, and up to its end
        text = tokenizer.decode(whole)[len(tokenizer.decode(before)) :].rpartition("</think>\n\n")[2]
        text = text[: text.rindex(end) + len(end)]
        _, rows = turns.take([said(row, tokenizer(text, add_special_tokens=False)["input_ids"])], 20.0)
        row = rows[0]
        messages += [own, *(call.result(contents[call.name]) for call in calls)]
    tokens = [*prompt.token_ids, *row.tokens]
    answer = tokenizer("it is 5" + end, add_special_tokens=False)["input_ids"]
    finished, rows = turns.take([said(row, answer)], 20.0)
    turns.close()
    assert not rows
    whole = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **config.data.chat_arguments
    )
    return tokens, whole, finished[0]


@pytest.mark.parametrize("name", ["QWEN3", "LLAMA3", "MISTRAL"])
def test_the_model_reads_its_template_applied_to_the_conversation(name: str, tmp_path: Path) -> None:
    """Also after a resume, in which the recorded replies take the place of the environment."""
    tokens, whole, response = played(name, tmp_path)
    assert tokens == whole
    assert (response.reward, response.finish_reason) == (1.0, "stop")
    assert response.scores == {"tool_calls": 2 + (name != "LLAMA3"), "malformed_calls": 0, "failed_calls": 0}
    recorded = (tmp_path / "replies.jsonl").read_text()
    again, _, other = played(name, tmp_path, resume=True)
    assert (again, other.reward, other.replies) == (tokens, 1.0, response.replies)
    assert (tmp_path / "replies.jsonl").read_text() == recorded, "no reply is new"


def test_a_model_whose_calls_do_not_come_back_is_refused_at_the_start(tmp_path: Path) -> None:
    tokenizer = family("QWEN3")
    tokenizer.chat_template = QWEN3.replace("<tool_call>", "<call>").replace("\n{", "{")
    with pytest.raises(
        RewardError, match=r"tiny_environments:Desk' has tools, but tlt cannot read calls in the form .*<call>"
    ):
        make_turns(recipe(), tokenizer, tmp_path / "reward.log")
