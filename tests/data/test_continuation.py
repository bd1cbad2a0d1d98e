"""Replies of environments: the tokens are those of the chat template applied to the whole conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_templates import CALL_ENDS, CHATML, ENDS, QWEN3, TOOLS, family

from tlt.config import DataConfig
from tlt.data.continuation import Call, Continuation, calling
from tlt.data.prompts import DataError, encoder, load_prompts, reply_encoder

CONTENTS = ("12", 'the word "low"', '{"temp": 7}', "  indented\n", "<html>&", "back\\slash", "low\nlow", "é 🙂", "")
CALLERS = ["QWEN3", "CODER", "SMOL", "LLAMA3", "MISTRAL", "MISTRAL_11", "MISTRAL_13", "GPT_OSS", "GLM4", "DEEPSEEK"]
GO = [{"role": "user", "content": "go"}]


def opened(name: str, tools: bool, words: str = "bytes", **data: Any) -> tuple[Any, Any, Continuation]:
    """Return the tokenizer of a family, the encoder of prompts and that of replies."""
    shown = {"chat_arguments": {"tools": TOOLS}} if tools else {}
    config = DataConfig(path="-", chat=True, **shown, **data)
    tokenizer = family(name, words)
    return tokenizer, encoder(tokenizer, config), reply_encoder(tokenizer, config)


def whole(tokenizer: Any, messages: list[dict[str, Any]], encode: Continuation) -> list[int]:
    """Return the tokens of the whole conversation, by transformers alone."""
    if tokenizer.chat_template.count("call.function.arguments +"):  # DeepSeek's takes text
        messages = json.loads(json.dumps(messages))
        for function in (call["function"] for message in messages for call in message.get("tool_calls", ())):
            function["arguments"] = json.dumps(function["arguments"])
    tools = TOOLS if encode.tools else None
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)


def check(tokenizer: Any, tokens: list[int], found: list[int], end: str, said: str) -> None:
    """Check that the tokens of a reply are the last ones, and that they follow the end of the turn `said`."""
    begin = len(tokens) - len(found)
    assert tokens[begin - 1 :] == [tokenizer.convert_tokens_to_ids(end), *found]
    assert tokenizer.decode(tokens[: begin - 1]).replace("</RESPONSE>", "").rstrip().endswith(said)


@pytest.mark.parametrize("words", ["bytes", "first", "each"])
@pytest.mark.parametrize("name", sorted(ENDS))
def test_a_users_message_is_that_of_the_whole_conversation(name: str, words: str) -> None:
    """Also after an earlier turn, and if a prompt has a system message or begins the model's turn."""
    tokenizer, _, encode = opened(name, name in ("GPT_OSS", "DEEPSEEK"), words)
    end = tokenizer.convert_tokens_to_ids(ENDS[name])
    said = {"role": "assistant", "content": "I say"}
    for content in CONTENTS:
        reply = [{"role": "user", "content": content}]
        check(tokenizer, whole(tokenizer, [*GO, said, *reply], encode), encode(reply, end, GO), ENDS[name], "I say")
        assert encode(reply, end, [*GO, said]) == encode(reply, end, GO)
        two = whole(tokenizer, [*GO, said, *reply, said, *reply], encode)
        check(tokenizer, two, encode(reply, end, GO, [("I say", reply)]), ENDS[name], "I say")


@pytest.mark.parametrize("words", ["bytes", "first", "each"])
@pytest.mark.parametrize("name", CALLERS)
def test_results_of_tools_are_those_of_the_whole_conversation(name: str, words: str) -> None:
    """They have the name and the id of their call, which some templates write, and others require."""
    tokenizer, _, encode = opened(name, True, words)
    end = tokenizer.convert_tokens_to_ids(CALL_ENDS[name])
    for number in (1, 1 + (name not in ("LLAMA3", "GPT_OSS"))):
        calls = [Call(("look_up", "add")[i], {"first": i}, f"{i}abcdefgh") for i in range(number)]
        for content in CONTENTS:
            turn = [calling(*calls), *(call.result(content) for call in calls)]
            last = {"CODER": "</tool_call>", "MISTRAL": "]", "LLAMA3": "}}", "DEEPSEEK": "</tool_call>"}
            last = {"MISTRAL_11": "}", "MISTRAL_13": "}", "GPT_OSS": "}"} | last
            tokens, found = whole(tokenizer, [*GO, *turn], encode), encode(turn, end, GO)
            check(tokenizer, tokens, found, CALL_ENDS[name], last.get(name, "</tool_call>"))
            tokens, found = whole(tokenizer, [*GO, *turn, *turn], encode), encode(turn, end, GO, [("", turn)])
            check(tokenizer, tokens, found, CALL_ENDS[name], last.get(name, "</tool_call>"))


@pytest.mark.parametrize("name", ["GEMMA3", "LLAMA2", "MISTRAL"])
def test_each_turn_may_follow_a_message_that_the_prompt_begins(name: str) -> None:
    """The templates of these families raise if two messages of the model follow each other."""
    tokenizer = family(name)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + tokenizer.chat_template
    )
    encode, end = reply_encoder(tokenizer, DataConfig(path="-", chat=True)), tokenizer.eos_token_id
    begun = [*GO, {"role": "assistant", "content": "Let me"}]
    assert encode("5", end, begun, [("see", "4")]) == encode("5", end, GO, [("Let me see", "4")])


def test_a_model_that_ends_its_turn_in_another_way_gets_the_end_of_the_template() -> None:
    """It stopped at another end token, or at a stop string, which the template does not write."""
    for last in ("<|tool|>", "e"):
        for name, end in (("QWEN3", "<|im_end|>\n"), ("LLAMA3", "<|eot_id|>"), ("COHERE", "</RESPONSE></TURN>")):
            tokenizer, _, encode = opened(name, False)
            found = tokenizer.decode(encode("5", tokenizer.convert_tokens_to_ids(last), GO))
            assert found.startswith(f"{end}<"), name
    tokenizer, _, encode = opened("PHI3", False)  # the token that begins the model's turn may end a turn too
    found = tokenizer.decode(encode("5", tokenizer.convert_tokens_to_ids("<|assistant|>"), GO))
    assert found.startswith("<|end|>")
    tokenizer, _, encode = opened("QWEN3", True)
    call = Call("add", {"first": 1})
    found = tokenizer.decode(encode([calling(call), call.result("5")], 5, GO))
    assert found.startswith("<|im_end|>\n<|im_start|>user<tool_response>\n5\n</tool_response><|im_end|>\n")


def test_the_system_prompt_may_change_the_beginning_of_a_turn() -> None:
    tokenizer, _, encode = opened("SMOL", False)
    system = [{"role": "system", "content": "Be short. /no_think"}]
    end, quiet = tokenizer.eos_token_id, "<|im_start|>assistant\n<think>\n\n</think>\n"
    assert tokenizer.decode(encode("5", end, [*system, *GO])).endswith(quiet)
    assert not tokenizer.decode(encode("5", end, GO)).endswith(quiet)


def test_the_earlier_turns_may_change_the_beginning_of_a_turn() -> None:
    tokenizer = family("QWEN3")
    tokenizer.chat_template = QWEN3 + "{{ messages | length }} {{ messages[1:-2] | map(attribute='content') | join }}"
    encode = reply_encoder(tokenizer, DataConfig(path="-", chat=True))
    found = encode("c", tokenizer.eos_token_id, GO, [("a", "b"), ("d", [{"role": "user", "content": "e"}])])
    assert tokenizer.decode(found).endswith("<|im_start|>assistant\n7 abde")


@pytest.mark.parametrize("words", ["bytes", "first", "each"])
@pytest.mark.parametrize("name", ["QWEN3", "MISTRAL", "GLM4", "PHI3", "GEMMA3"])
def test_names_of_special_tokens_in_a_reply_are_text(name: str, words: str) -> None:
    """Also in the name of a tool, which the model wrote. The reply cannot end a turn or begin a message."""
    tools = name not in ("PHI3", "GEMMA3")
    tokenizer, _, encode = opened(name, tools, words)
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    call, plain = Call("".join(special), {}), Call("x", {})
    for content in (ENDS[name], f"a{ENDS[name]}b {CALL_ENDS[name]}", "low" + " ".join(special)):
        turn, other = ([calling(c), c.result(text)] for c, text in ((call, content), (plain, "x")))
        if not tools:
            turn, other = ([{"role": "user", "content": text}] for text in (content, "x"))
        found, expected = (encode(reply, tokenizer.eos_token_id, GO) for reply in (turn, other))
        counts = [[tokens.count(i) for i in tokenizer.added_tokens_decoder] for tokens in (found, expected)]
        assert counts[0] == counts[1]
        written = json.dumps(content)[1:-1] if name == "MISTRAL" else content
        assert written in tokenizer.decode(found)


@pytest.mark.parametrize("words", ["bytes", "first", "each"])
def test_without_a_template_a_reply_follows_the_text(words: str) -> None:
    """SentencePiece would put a space before its first word. A reply that begins with a space keeps it."""
    tokenizer = family("LLAMA2", words)
    encode, said = (
        reply_encoder(tokenizer, DataConfig(path="-")),
        tokenizer("so", add_special_tokens=False)["input_ids"],
    )
    for text in ("low", " low", "\nlow", "\n\nlow", "</s>low", "12</s>", "é", ""):
        for last in (None, said[-1], tokenizer.eos_token_id):
            assert tokenizer.decode([*said, *encode(text, last)]) == f"so{text}"
            assert tokenizer.eos_token_id not in encode(text, last)
    assert encode([{"role": "user", "content": "low"}, {"role": "tool", "content": "12"}], 1) == encode("low\n12", 1)


def test_a_prompt_keeps_its_messages(tmp_path: Path) -> None:
    """Replies are rendered with them."""
    rows = ["go", [{"role": "user", "content": "go"}, {"role": "assistant", "content": "I"}]]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"question": row}) + "\n" for row in rows), encoding="utf-8")
    config = DataConfig(path=str(tmp_path / "p.jsonl"), chat=True, system="Be short.")
    one, two = load_prompts(config, encoder(family("QWEN3"), config))
    assert one.messages == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "go"}]
    assert two.messages[2] == {"role": "assistant", "content": "I"}
    plain = load_prompts(DataConfig(path=str(tmp_path / "p.jsonl")), lambda question: (1,))
    assert plain[0].messages == []


def test_a_template_that_drops_replies_is_refused() -> None:
    tokenizer = family("QWEN3")
    for template, role, tools in (
        (
            QWEN3.replace("m.role == 'tool'", "false").replace("<|im_start|>{{ m.role }}\n{{ m.content }}", ""),
            "tool",
            TOOLS,
        ),
        (CHATML + "{{ messages[0].content }}{{ messages[1].content }}", "user", None),
    ):
        tokenizer.chat_template = template
        config = DataConfig(path="-", chat=True, **({"chat_arguments": {"tools": tools}} if tools else {}))
        with pytest.raises(DataError, match=f"writes no {role} message after a response: use another template"):
            reply_encoder(tokenizer, config)


def test_a_message_that_the_template_drops_is_an_error_of_the_reply() -> None:
    """The templates of Qwen 2.5 and 3, Phi 3, GLM 4.5 and DeepSeek write nothing for a role that they do not know."""
    tokenizer = family("QWEN3")
    tokenizer.chat_template = QWEN3.replace("{% else %}<|im_start|>", "{% elif m.role == 'user' %}<|im_start|>")
    encode = reply_encoder(tokenizer, DataConfig(path="-", chat=True))
    known, unknown = {"role": "user", "content": "5"}, {"role": "observation", "content": "5"}
    for reply in ([known], [unknown], [known, unknown], [known]):
        if unknown not in reply:
            assert "5" in tokenizer.decode(encode(reply, tokenizer.eos_token_id, GO))
            continue
        with pytest.raises(
            DataError, match=r"leaves out the observation message of a reply: use a role .* such as user"
        ):
            encode(reply, tokenizer.eos_token_id, GO)
    after_calls = "m.role == 'tool' and messages[loop.index0 - 1].tool_calls"
    tokenizer.chat_template = tokenizer.chat_template.replace("elif m.role == 'tool'", f"elif {after_calls}")
    encode = reply_encoder(tokenizer, DataConfig(path="-", chat=True, chat_arguments={"tools": TOOLS}))
    assert "5" in tokenizer.decode(encode([calling(Call("add", {})), Call("add", {}).result("5")], 1, GO))
    with pytest.raises(DataError, match="leaves out the tool message"):
        encode([Call("add", {}).result("5")], 1, GO)


def test_a_reply_ends_with_a_message_to_the_model() -> None:
    """After another one, the template would not begin the model's turn."""
    tokenizer, _, encode = opened("QWEN3", False)
    said = {"role": "assistant", "content": "So"}
    for reply in ([said], [said, {"role": "user", "content": "5"}, said]):
        with pytest.raises(DataError, match="a reply must end with a message to the model"):
            encode(reply, tokenizer.eos_token_id, GO)


def test_a_reply_that_the_template_refuses_is_an_error_of_the_reply() -> None:
    tokenizer, _, encode = opened("LLAMA3", True)
    calls = [Call("add", {}), Call("add", {})]
    with pytest.raises(DataError, match="only supports single tool-calls"):
        encode([calling(*calls), *(call.result("5") for call in calls)], tokenizer.eos_token_id, GO)
