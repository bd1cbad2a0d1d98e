"""Tool calls are carried out or counted as malformed. None is taken as the answer, and no argument is dropped."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import pytest
from tiny_templates import CALL_ENDS, LLAMA3, QWEN3, TOOLS, family
from transformers.utils.chat_parsing import parse_response

from tlt.config import DataConfig
from tlt.data.continuation import Call, Continuation, calling
from tlt.data.prompts import reply_encoder
from tlt.environments.call_reader import FORMS, CallReader, call_reader

ARGUMENTS = {"first": 2, "word": 'é </tool_call> "x"\nz', "table": {"a": [1, None]}, "loud": True}
JSON = '{"name": "add", "arguments": {"first": 2}}'
CALL = QWEN3[QWEN3.index("<tool_call>") : QWEN3.index("</tool_call>") + len("</tool_call>")]
GEMMA4 = {  # as in the tokenizers of Gemma 4
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
    },
}


def encoder_of(name: str, template: str = "", response_template: Any = None) -> Continuation:
    """Return the encoder of replies of a family's tokenizer with tools. The templates replace its own."""
    tokenizer = family(name)
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.response_template = response_template
    return reply_encoder(tokenizer, DataConfig(path="-", chat=True, chat_arguments={"tools": TOOLS}))


def reader(name: str, template: str = "", response_template: Any = None) -> CallReader:
    return call_reader(encoder_of(name, template, response_template))


@pytest.mark.parametrize(
    "name", ["QWEN3", "CODER", "SMOL", "LLAMA3", "MISTRAL", "MISTRAL_11", "MISTRAL_13", "GLM4", "DEEPSEEK"]
)
def test_calls_that_a_template_writes_are_read_back(name: str) -> None:
    """The end of the turn may be a special token. In some forms, arguments are text, as the template writes them."""
    encode = encoder_of(name)
    read, end = call_reader(encode), CALL_ENDS[name]
    assert (read.fault, read.several) == ("", name != "LLAMA3")
    given = ARGUMENTS
    if name in ("CODER", "GLM4"):
        given = {
            "first": "2",
            "word": "a\n<b>",
            "table": '{"a": [1, null]}',
            "loud": "True" if name == "CODER" else "true",
        }
    calls = [
        Call(tool, ARGUMENTS | {"word": given["word"]}, f"{i}bcdefghi") for i, tool in enumerate(("add", "look_up"))
    ]
    turn = encode.written(calling(*calls[: 1 + read.several]))
    for written in (turn, turn.removesuffix(end), turn.split(end)[0] + end):
        found = read(written)
        assert [call.name for call in found] == ["add", "look_up"][: 1 + read.several]
        assert all(call.arguments == given for call in found)
        assert [call.id for call in found] == [call.id if name in ("MISTRAL", "MISTRAL_11") else "" for call in calls][
            : 1 + read.several
        ]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (f"<tool_call>\n{JSON}\n</tool_call><|im_end|>", {"first": 2}),
        (f"I add.<tool_call>{JSON}</tool_call>\n", {"first": 2}),
        (f"<tool_call>{JSON}", {"first": 2}),  # the turn ended before the tag did
        ('<tool_call>{"arguments": {"first": 2}, "name": "add"}</tool_call>', {"first": 2}),
        (f'<tool_call>{{"type": "function", "function": {JSON}}}</tool_call>', {"first": 2}),
        ('<tool_call>{"name": "add"}</tool_call>', {}),
        # a tag inside an argument (vllm #45167)
        (
            '<tool_call>{"name": "add", "arguments": {"word": "a </tool_call> b"}}</tool_call>',
            {"word": "a </tool_call> b"},
        ),
        # Llama 3
        ('{"name": "add", "parameters": {"first": 2}}<|eot_id|>', {"first": 2}),
        ('<|python_tag|>{"type": "function", "name": "add", "parameters": {"first": 2}}<|eom_id|>', {"first": 2}),
        ('{"parameters": {"first": 2}, "name": "add"}', {"first": 2}),
        ('I add.\n{"name": "add", "parameters": {"first": 2}}', {"first": 2}),
        # Mistral
        (f"[{JSON}]", {"first": 2}),
        (f"[TOOL_CALLS] [{JSON}]</s>", {"first": 2}),
        ('[{"id": "abcdefghi", "name": "add", "arguments": {"first": 2}}]', {"first": 2}),
        ('add{"first": 2}', {"first": 2}),
        ('[TOOL_CALLS]add[ARGS]{"first": 2}</s>', {"first": 2}),
        # Qwen3-Coder; one line break after the open tag and one before the closing tag belong to it
        (
            "<tool_call><function=add><parameter=word>\n\n a\n\n\n</parameter>\n</function></tool_call>",
            {"word": "\n a\n\n"},
        ),
        ("\n<function=add>\n<parameter=first>\n2\n</parameter>\n</function>\n", {"first": "2"}),
        # GLM 4.5
        ("<tool_call>add\n<arg_key>first</arg_key>\n<arg_value>2</arg_value>\n</tool_call>", {"first": "2"}),
        # text before a call without a tag
        (f"I add: {JSON}", {"first": 2}),
        # the end of a reasoning inside an argument
        ('{"name": "add", "parameters": {"word": "</think> 5"}}', {"word": "</think> 5"}),
        (
            '<think>Hm</think><tool_call>{"name": "add", "arguments": {"word": "a</think>"}}</tool_call>',
            {"word": "a</think>"},
        ),
        # a call in the reasoning is none
        (f'<think>{{"name": "x"}} or <tool_call>no</tool_call>?</think>\n<tool_call>{JSON}</tool_call>', {"first": 2}),
    ],
)
def test_the_forms_of_families_are_read_without_a_template(text: str, arguments: dict[str, Any]) -> None:
    (call,) = CallReader()(text)
    assert (call.name, call.arguments, call.error) == ("add", arguments, "")


ANSWERS = (
    "5", "", '{"answer": 5}', "[5]", "[1] The answer", "<think><tool_call>{}</tool_call></think>5", "add(2, 3) = 5",
    'Here:\n{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', '[{"name": "Bob"}]',
    "\\boxed{5}", "x < 3 <b>", "The function add is fine.",
)  # fmt: skip


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_is_not_a_call(text: str) -> None:
    for read in (CallReader(), reader("QWEN3"), reader("LLAMA3"), reader("MISTRAL_11")):
        assert read(text) == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>add(2, 3)</tool_call>", "the call is not JSON"),
        ("<tool_call></tool_call>", "the call is not JSON"),
        ("<tool_call>" + "[" * 100_000, "the call is not JSON"),
        (f"<tool_call>{JSON}</tool_cal", "the call is not JSON: Extra data"),
        ('{"name": "add", "parameters": {"first": 2}', "the call is not JSON"),
        ("{'name': 'add', 'parameters': {'first': 2}}", "the call is not JSON"),
        (f"{JSON}; {JSON}", "the call is not JSON: Extra data"),
        ("[add(first=2)]", "the call is not JSON"),
        ("<tool_call>[5]</tool_call>", 'a call is a JSON object with "name" and "arguments"'),
        ("<tool_call>{}</tool_call>", 'a call is a JSON object with "name" and "arguments"'),  # trl #4881
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', 'a call is a JSON object with "name"'),
        ('<tool_call>{"name": "add", "arguments": [2, 3]}</tool_call>', "a call is a JSON object"),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "a call is a JSON object"),
        ('<tool_call>{"name": "add", "arguments": {"word": "\\ud83d"}}</tool_call>', "has a lone surrogate"),
        # arguments under another key, or twice: the tool would run without them
        ('<tool_call>{"name": "add", "args": {"first": 2}}</tool_call>', "\"arguments\", without 'args'"),
        ('<tool_call>{"name": "add", "first": 2}</tool_call>', "without 'first'"),
        ('<tool_call>{"name": "add", "parameters": {"first": 2}, "arguments": {}}</tool_call>', "without 'parameters'"),
        (f'<tool_call>{{"function": {JSON}, "first": 2}}</tool_call>', "without 'first'"),
        ('<tool_call>{"name": "add", "arguments": {"first": 2, "first": 3}}</tool_call>', "an object has a key twice"),
        (
            "<tool_call><function=add><parameter=first>2</parameter><parameter=first>3</parameter></function></tool_call>",
            "the call has an argument twice",
        ),
        # text around a call without a tag
        (f"I add `{JSON}`", "the call is not JSON: Extra data"),
        (f"I add {JSON} now", "the call is not JSON: Extra data"),
        # an argument without its end tag, or with another one (claude-code #84362, vllm #49248)
        ("<tool_call><function=add><parameter=first>2</function></tool_call>", "outside its arguments"),
        (
            "<tool_call><function=add><parameter=first>2<parameter=word>x</parameter></function></tool_call>",
            "outside its arguments",
        ),
        (
            "<tool_call><function=add><parameter=first>2</first><parameter=word>x</parameter></function></tool_call>",
            "outside its arguments",
        ),
        ("<tool_call><function=add>2</parameter></function></tool_call>", "outside its arguments"),
        ("<tool_call>add<arg_key>word</arg_key>how many</arg_value></tool_call>", "outside its arguments"),
        # an argument whose text ends with its end tag
        (
            "<tool_call><function=add><parameter=word>a</parameter>\n</parameter></function></tool_call>",
            "outside its arguments",
        ),
        (
            "<tool_call>add<arg_key>word</arg_key><arg_value>a</arg_value></arg_value></tool_call>",
            "outside its arguments",
        ),
        # tags without a call
        ("add 2</tool_call>", "not in the form of the chat template"),
        ("<parameter=first>2</parameter>", "not in the form of the chat template"),
        ('<|python_tag|>brave_search.call(query="x")', "not in the form of the chat template"),
    ],
)
def test_what_looks_like_a_call_is_a_malformed_call(text: str, error: str) -> None:
    (call,) = CallReader()(text)
    assert error in call.error
    assert len(call.error) < 400


@pytest.mark.parametrize("name", ["QWEN3", "LLAMA3", "MISTRAL", "MISTRAL_11", "CODER", "GLM4"])
def test_a_call_in_the_form_of_another_family_is_malformed(name: str) -> None:
    """The model is shown the form of its chat template."""
    texts = {
        "QWEN3": f"<tool_call>{JSON}</tool_call>",
        "LLAMA3": '{"name": "add", "parameters": {"first": 2}}',
        "MISTRAL_11": '[TOOL_CALLS]add[ARGS]{"first": 2}',
        "CODER": "<tool_call><function=add><parameter=first>2</parameter></function></tool_call>",
        "GLM4": "<tool_call>add<arg_key>first</arg_key><arg_value>2</arg_value></tool_call>",
    }
    read = reader(name)
    for other, text in texts.items():
        (call,) = read(text)
        if other == name or (other, name) == ("LLAMA3", "MISTRAL"):
            assert (call.name, call.error) == ("add", "")
        else:
            assert call.error
    (call,) = read("so <tool_call" if name != "QWEN3" else '{"name": "add", "arguments": {}}')
    assert call.error == f"the call is not in the form of the chat template, as {read.example}"
    assert "add" in read.example
    assert "<|" not in read.example.replace("<|observation|>", ""), "without the end of the turn"


def test_an_id_that_is_not_valid_text_is_left_out() -> None:
    (call,) = CallReader()(r'[{"id": "\ud83d", "name": "add", "arguments": {}}]')
    assert (call.name, call.id, call.error) == ("add", "", "")


def test_a_malformed_call_does_not_hide_another() -> None:
    found = CallReader()(f"<tool_call>{JSON}</tool_call><tool_call>{{bad}}</tool_call>\n<tool_call>{JSON}</tool_call>")
    assert [bool(call.error) for call in found] == [False, True, False]
    found = CallReader()(f"<tool_call>{JSON}</tool_call>\n{JSON}</tool_call>")
    assert [bool(call.error) for call in found] == [False, True], "its tag is missing"


def test_two_calls_are_malformed_if_the_template_writes_one() -> None:
    (call,) = reader("LLAMA3")(f"[{JSON}, {JSON}]")
    assert call.error == "the chat template has one call in a turn"


def test_the_response_template_of_the_tokenizer_comes_first() -> None:
    """It reads what transformers reads, and its tags mark a call."""
    template = QWEN3.replace(
        CALL, "<|tool_call>call:{{ call.function.name }}{{ call.function.arguments | tojson }}<tool_call|>"
    )
    read = reader("QWEN3", template, GEMMA4)
    assert read.form == GEMMA4
    text = (
        '<|channel>thought\nHm.<channel|>I add.<|tool_call>call:add{first:2,word:<|"|>a "b"<|"|>}<tool_call|><|im_end|>'
    )
    (call,) = read(text)
    (expected,) = parse_response(text, GEMMA4, prefix="")["tool_calls"]
    assert {"name": call.name, "arguments": call.arguments} == expected["function"]
    for malformed in (
        "<|tool_call>call:add{first:}<tool_call|>",
        "<|tool_call>add{}<tool_call|>",
        f"<tool_call>{JSON}",
    ):
        (call,) = read(malformed)
        assert call.error
    same = {**FORMS[2], "start_anchor": "x"}  # it reads what one of ours reads
    assert reader("QWEN3", response_template=same).form == same
    without_calls = {"start_anchor": "x", "fields": {"content": {}}}
    assert reader("QWEN3", response_template=without_calls).form in FORMS


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (
            QWEN3.replace(CALL, "<call>{{ call.function.name }}()</call>"),
            r"calls in the form .*'<call>add.*set response_te",
        ),
        (QWEN3.replace("{% for call in m.tool_calls or [] %}", "{% for call in [] %}"), "set response_template in"),
        (
            QWEN3.replace('": {{ call.function.arguments | tojson }}}', '": {{ call.function.arguments | tojson }}'),
            "set response",
        ),
        (LLAMA3.replace("call.arguments | tojson", "call.arguments"), "set response_template in"),  # Python's, not JSON
        (QWEN3.replace("{{ call.function.name }}", "{{ raise_exception('no calls') }}"), "refuses a prompt: no calls"),
    ],
)
def test_calls_that_cannot_be_read_back_are_a_fault(template: str, fault: str) -> None:
    found = reader("QWEN3" if "im_start" in template else "LLAMA3", template).fault
    assert re.search(fault, found.replace("\n", " ")), found


def test_an_older_transformers_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing", None)
    assert "transformers 5.13" in reader("QWEN3").fault


def test_hostile_turns_are_read_in_time() -> None:
    """A pattern with two open ends would take quadratic time: minutes for these."""
    turns = [
        *("<tool_call>" * 9000, "<function=a>" + "<parameter=a>" * 9000, "\n" * 99_999, "<" * 99_999, "[ " * 50_000),
        *(
            "<tool_call>" + "</" * 50_000,
            "[TOOL_CALLS]" + " " * 99_999 + "y",
            "x" + " \n" * 50_000 + "y",
            "\n[ " * 30_000,
        ),
        *('\n{"type":"a",' * 9000, '\n{"name": 1' * 9000, "<tool_call>a<arg_key>" * 5000, "</function>\n" * 9000),
    ]
    read, began = CallReader(), time.monotonic()
    for turn in turns:
        read(turn)
    assert time.monotonic() - began < 10
