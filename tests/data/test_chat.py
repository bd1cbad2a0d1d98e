"""Messages in the formats of real data, and chat templates that drop them, change them, or write the time."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow
import pyarrow.parquet
import pytest
from tiny import save_tokenizer, save_weights, tiny_config, tiny_model, train

from tlt.build import load_tokenizer
from tlt.commands.generate import Asked, _data_of_the_run, _prompts
from tlt.config import Config, ConfigError, DataConfig, parse_config
from tlt.data.prompts import DataError, encoder, load_prompts, reply_encoder
from tlt.data.tables import read_rows
from tlt.environments import make_turns
from tlt.environments.episodes import Turns
from tlt.store import checkpoint

END = "{% if add_generation_prompt %}<bot>{% endif %}"
EVERY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + END
TRIMS = "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}<end>{% endfor %}" + END
QWEN2 = (  # no tool messages, no developer, a system message alone
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% else %}<system>helpful{% endif %}"
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}" + END
)
QWEN3 = (  # earlier reasoning goes
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{% endfor %}{% endfor %}" + END
)
CALLS = (  # content is read where there are no tool calls, as in Qwen 2.5, and users alternate with assistants
    "{% set turn = namespace(of='user') %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}{% else %}{{ '' + m.content }}{% endif %}"
    "{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if m.role != turn.of %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set turn.of = 'user' if m.role == 'assistant' else 'assistant' %}{% endif %}{% endfor %}" + END
)
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "u"}


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


THINKS = EVERY + "{{ '<think>\n' }}"
FIVE, CALLED = turn("tool", "5"), "<user>u<assistant><call>add"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def shown(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that returns the text of a row's prompt as the model sees it."""

    def text(template: str, question: Any, parquet: bool = False, **options: Any) -> str:
        monkeypatch.setattr(tokenizer, "chat_template", template)
        path = tmp_path / ("p.parquet" if parquet else "p.jsonl")
        if parquet:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"question": question}]), path)
        else:
            path.write_text(json.dumps({"question": question}), encoding="utf-8")
        config = DataConfig(path=str(path), chat=True, **options)
        (prompt,) = load_prompts(config, encoder(tokenizer, config))
        return tokenizer.decode(prompt.token_ids)

    return text


@pytest.mark.parametrize("parquet", [False, True])
def test_a_part_becomes_text_and_messages_may_be_json(shown: Any, parquet: bool) -> None:
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "input_text", "text": "b", "image": None}]
    messages = [turn("system", parts[:1]), turn("user", parts[1:])]
    assert shown(EVERY, messages, parquet) == "<system>a<user>b<bot>"
    assert shown(EVERY, json.dumps(messages), parquet) == "<system>a<user>b<bot>"
    assert shown(EVERY, '[1, "role"]', parquet) == '<user>[1, "role"]<bot>', "it is no list of messages"


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (turn("user", [{"type": "image_url", "image_url": "x"}]), r"line 1, message 0 has a part of type 'image_url'"),
        (turn("user", [{"type": "text", "text": "a"}, {"type": "video"}]), r"a part of type 'video'"),
        (turn("user", [{"type": "text", "text": "a"}] * 2), r"message 0 has 2 parts: join them"),
        (turn("user", [{"type": "text", "text": None}]), r"a part of type 'text'"),
        (turn("user", None), r"message 0 \(user\) has no text: its content is None"),
        (turn("user", []), r"has no text: its content is \[\]"),
        (turn("user", "a\ud800"), r"^prompt 0 contains a lone surrogate, which is not text: .*\\ud800"),
        ({"role": "user", "text": "a"}, r"neither text nor messages under 'question'"),
    ],
)
def test_content_that_is_not_text_is_refused_with_its_type(shown: Any, message: dict[str, Any], fault: str) -> None:
    with pytest.raises(DataError, match=fault) as error:
        shown(EVERY, [message])
    assert "\n" not in str(error.value)


def test_tool_calls_have_no_arguments_of_other_functions(tmp_path: Path) -> None:
    """Arrow fills the keys that another row has with null."""
    add = {"function": {"name": "add", "arguments": {"a": 1, "more": {"b": [2]}}}}
    say = {"function": {"name": "say", "arguments": {"word": "x", "more": {"loud": True}}}}
    rows = [[USER, turn("assistant", "", tool_calls=[call]), turn("tool", "5")] for call in (add, say)]
    rows.append([USER, turn("assistant", None, tool_calls=[add, say]), turn("tool", "5")])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"question": row} for row in rows]), tmp_path / "p.parquet")
    read = [row["question"] for _, row in read_rows(str(tmp_path / "p.parquet"))]
    assert read == rows


def test_a_key_of_a_message_without_a_value_is_not_written(shown: Any) -> None:
    """Tables give all messages the same keys (LlamaFactory #10455, transformers #45422)."""
    messages = [turn("user", "u", name=None), turn("assistant", None, tool_calls=[CALL], name=None), FIVE]
    named = QWEN3.replace("m.role", "m.role ~ (m.name if 'name' in m)")
    assert shown(named, messages) == f"{CALLED}<tool>5<bot>"
    texts = "{% for m in messages %}{{ '' + m.content }}{{ m.tool_calls }}{% endfor %}"
    assert shown(texts, messages) == f"u{[CALL]}5"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_prompts_without_a_system_message_get_one(shown: Any, role: str) -> None:
    assert shown(EVERY, [USER], system="s") == "<system>s<user>u<bot>"
    assert shown(EVERY, [turn(role, "own"), USER], system="s") == f"<{role}>own<user>u<bot>"


@pytest.mark.parametrize(
    ("template", "messages", "options", "fault"),
    [
        (USERS, [turn("system", "be brief"), USER], {}, r"^prompt 0: .* leaves out the system message 'be brief'"),
        (USERS, "u", {"system": "be brief"}, r"leaves out the system message 'be brief'"),
        (USERS, [USER, turn("assistant", "b"), USER], {}, r"leaves out the assistant message 'b'"),
        (QWEN2, [turn("developer", "d"), USER], {}, r"leaves out the developer message 'd'"),
        (QWEN2, [USER, turn("system", "late"), USER], {}, r"leaves out the system message 'late'"),
        (QWEN2, [USER, turn("tool", "5")], {}, r"leaves out the tool message '5'"),
        (EVERY, [USER, turn("assistant", "", tool_calls=[CALL]), turn("tool", "5")], {}, r"leaves out the tool_calls"),
        (EVERY, [turn("system", "s", tools=[CALL]), USER], {}, r"leaves out the tools of the system message 's'"),
        (
            QWEN3,
            [USER, turn("assistant", "<think>x</think>y")],
            {},
            r"changes a prompt's last message \('<think>x</thi",
        ),
        (EVERY + "{{ messages.bad.worse }}", "u", {}, r"the tokenizer's chat template refuses a prompt"),
    ],
)
def test_messages_that_a_template_drops_are_refused(
    shown: Any, template: str, messages: Any, options: dict[str, Any], fault: str
) -> None:
    with pytest.raises(DataError, match=fault):
        shown(template, messages, **options)


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (QWEN2, "u", "<system>helpful<user>u<bot>"),
        (QWEN2, [turn("system", ""), USER], "<system><user>u<bot>"),  # and not the template's own
        (QWEN3, [USER, turn("assistant", "<think>x</think>y"), USER], "<user>u<assistant>y<user>u<bot>"),
        (QWEN3, [USER, turn("assistant", None, tool_calls=[CALL]), FIVE], "<user>u<assistant><call>add<tool>5<bot>"),
        *(
            (CALLS, [USER, call, FIVE, turn("assistant", "b"), USER], f"{CALLED}<tool>5<assistant>b<user>u<bot>")
            for call in ({"role": "assistant", "tool_calls": [CALL]}, turn("assistant", "", tool_calls=[CALL]))
        ),
        (EVERY + "{# human #}", [turn("human", "u")], "<human>u<bot>"),
        (EVERY, [turn("user", "u", name="Ann", weight=1)], "<user>u<bot>"),
    ],
)
def test_allowed_changes_of_a_template_are_accepted(shown: Any, template: str, messages: Any, text: str) -> None:
    if "content.split" in template:
        template = template.replace("m.content.split", "(m.content or '').split")
    assert shown(template, messages) == text


def test_messages_and_fields_of_the_chat_template_need_it(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"lists of messages: set data\.chat = true"):
        encoder(tokenizer, DataConfig(path="-"))([USER])
    with pytest.raises(ValueError, match=r"need data\.chat = true"):
        DataConfig(path="-", system="be brief")


TOOLS = {"tools": [{"x": 1}]}


@pytest.mark.parametrize(
    ("column", "given", "remedy"),
    [
        (TOOLS, {}, "the tools in the rows of .*: set data.chat_arguments.tools"),
        (TOOLS, TOOLS, "^$"),
        ({"images": [{"path": "a.png"}]}, {}, "the images in the rows of .* are not in the prompts: the model reads"),
        ({"chat_template_kwargs": {"now": "x"}}, {}, "the chat_template_kwargs in .*: set data.chat_arguments"),
        ({"images": [], "chat_template_kwargs": {}, "tools": None}, {}, "^$"),
    ],
)
def test_columns_that_the_prompts_do_not_show_are_logged(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, column: Any, given: Any, remedy: str
) -> None:
    tokenizer.chat_template = EVERY + "{% for tool in tools or [] %}{{ tool.x }}{% endfor %}"
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": "u", **column}), encoding="utf-8")
    config = DataConfig(path=str(tmp_path / "p.jsonl"), chat=True, chat_arguments=given)
    load_prompts(config, encoder(tokenizer, config))
    assert re.search(remedy, caplog.text)


def test_later_messages_with_other_keys_are_tested_too(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", EVERY)
    encode = encoder(tokenizer, DataConfig(path="-", chat=True))
    encode([USER, turn("assistant", "b"), USER])
    with pytest.raises(DataError, match="leaves out the tool_calls"):
        encode([USER, turn("assistant", "b", tool_calls=[CALL]), USER])


@pytest.mark.parametrize("begun", ["Let me", "Let me ", "So:\n\n", ""])
def test_a_response_continues_the_whole_prefill_message(shown: Any, tokenizer: Any, begun: str) -> None:
    messages = [USER, turn("assistant", begun)]
    assert shown(TRIMS, messages) == "<user>\nu<end><assistant>\n" + begun
    assert shown(EVERY, messages, prefill=" x") == f"<user>u<assistant>{begun} x"
    assert shown(EVERY, [turn("user", "zq0qz"), messages[1]]) == f"<user>zq0qz<assistant>{begun}", "it has our mark"
    assert shown(THINKS, "u", prefill="I <think>") == "<user>u<bot><think>\nI <think>"
    theirs = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert shown(EVERY, messages) == theirs


DATED = (  # as Llama 3.2 does
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y %H:%M:%S') %}{% endif %}"
    "Today Date: {{ date_string }}" + EVERY
)


def test_templates_see_one_fixed_time(shown: Any) -> None:
    assert shown(DATED, "u", now="2001-02-03") == "Today Date: 03 Feb 2001 00:00:00<user>u<bot>"
    assert shown(DATED, "u", now="2001-02-03T04:05:06").startswith("Today Date: 03 Feb 2001 04:05:06<")
    assert shown(DATED, "u", chat_arguments={"date_string": "now"}) == "Today Date: now<user>u<bot>"
    assert shown(DATED.replace(" %H:%M:%S", ""), "u").startswith(f"Today Date: {datetime.now():%d %b %Y}<")


def test_the_clock_of_transformers_is_restored_after_a_prompt(shown: Any, tokenizer: Any) -> None:
    for template, outcome in ((DATED, nullcontext()), (DATED + "{{ raise_exception('') }}", pytest.raises(DataError))):
        with outcome:
            shown(template, "u", now="2001-02-03")
        tokenizer.chat_template = DATED
        today = tokenizer.apply_chat_template([USER], tokenize=False)
        assert today.startswith(f"Today Date: {datetime.now():%d %b %Y} ")


def test_arguments_that_the_template_does_not_read_are_refused(shown: Any, tokenizer: Any) -> None:
    template = (
        "{% if enable_thinking is defined and not enable_thinking %}brief {% endif %}"
        "{% set style = style or 'plain' %}{{ style }}{% generation %}" + EVERY + "{% endgeneration %}"
    )
    given = {"enable_thinking": False, "style": "terse"}
    assert shown(template, "u", chat_arguments=given) == "brief terse<user>u<bot>"
    said = r"does not read enable_thinkng of data\.chat_arguments, but .*enable_thinking,.*: correct or"
    with pytest.raises(DataError, match=said):
        shown(template, "u", chat_arguments=given | {"enable_thinkng": False})
    with pytest.raises(DataError, match=r"does not read zzz of data\.chat_arguments, but"):
        shown(template, "u", chat_arguments={"zzz": []})
    assert shown(template, "u", chat_arguments={"chat_template": EVERY}) == "<user>u<bot>"


def dated(home: Path, steps: int, **data: Any) -> Config:
    if not (home / "model").is_dir():
        save_tokenizer(save_weights(home / "model"))
        (home / "model" / "chat_template.jinja").write_text(DATED, encoding="utf-8")
        (home / "prompts.jsonl").write_text('{"question": "a"}\n{"question": "b"}', encoding="utf-8")
    sections = {"data": {"chat": True, **data}, "rollout": {"max_new_tokens": 4}, "train": {"steps": steps}}
    return tiny_config(home, **sections)


def test_a_run_keeps_the_time_of_its_start(tmp_path: Path) -> None:
    with patch("tlt.run.resume.datetime", SimpleNamespace(now=lambda: datetime(2001, 2, 3))):
        train(dated(tmp_path, 1))
    train(dated(tmp_path, 2), resume=True)
    found = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert (found.state["step"], found.state["config"]["data"]["now"]) == (2, "2001-02-03T00:00:00")
    tokenizer = load_tokenizer(found.folder / "policy")
    (prompt,) = _prompts(Asked(["u"], None, {}), tokenizer, _data_of_the_run(found.folder / "policy"))
    assert tokenizer.decode(prompt.token_ids).startswith("Today Date: 03 Feb 2001")
    with pytest.raises(ConfigError, match=r"data\.now = \"2001-02-04\", but the run to be resumed has \"2001-02-03"):
        train(dated(tmp_path, 3, now="2001-02-04"), resume=True)
    (tmp_path / "model" / "chat_template.jinja").write_text(EVERY, encoding="utf-8")
    with pytest.raises(DataError, match=r"or their tokens, are not those of the run"):
        train(dated(tmp_path, 3), resume=True, force=["model.path"])


def replies(tokenizer: Any, template: str = "", **data: Any) -> Any:
    tokenizer.chat_template = template or None
    return reply_encoder(tokenizer, DataConfig(path="-", chat=bool(template), **data))


NO_REPLY = "{% for m in messages[:2] %}<{{ m.role }}>{{ m.content }}{% endfor %}" + END


def test_a_template_that_shows_no_tools_or_writes_no_reply_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="does not show tools to the model"):
        replies(tokenizer, END, chat_arguments={"tools": [{"name": "add"}]})
    with pytest.raises(DataError, match="writes no user message after a response"):
        replies(tokenizer, NO_REPLY)


def test_a_run_without_an_environment_needs_no_replies(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = NO_REPLY
    config = parse_config({"model": {"path": "-"}, "data": {"path": "-", "chat": True}, "reward": {"name": "exact"}})
    assert type(make_turns(config, tokenizer, tmp_path / "reward.log")) is Turns
