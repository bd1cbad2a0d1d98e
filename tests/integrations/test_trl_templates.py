"""Chat templates of model families, as TRL ships them: replies are rendered as by the template, and calls come back."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny_templates import TOOLS, byte_words
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tlt.config import DataConfig
from tlt.data.chat import _fixed_time
from tlt.data.continuation import Call, Continuation, calling
from tlt.data.prompts import DataError, reply_encoder
from tlt.environments.call_reader import call_reader

FOLDER = Path(getattr(find_spec("trl"), "origin", None) or "-").parent / "chat_templates"
TEMPLATES = {path.stem: path for path in sorted(FOLDER.glob("*.jinja")) if "training" not in path.stem}
SPECIAL = re.compile(r"</?\|?[a-zA-Z_]+\|?>|<｜[^｜]*｜>|\[/?[A-Z_]{3,}\]|\[gMASK\]")
GO, SAY = {"role": "user", "content": "go"}, {"role": "assistant", "content": "I say"}
IMAGES = ("idefics3", "llava_next", "smolvlm")  # they take no text
NO_CALLS = ("lfm2", "lfm2_v2")  # they show tools, but write no calls
OWN = ("diffusion_gemma", "gemma4", "gptoss", "lfm2", "muse_glimmer")
"""beginning of the names of templates whose calls need a response template"""

pytestmark = pytest.mark.skipif(not TEMPLATES, reason="TRL is not installed: make test-trl")


def tokenizer_of(name: str) -> Any:
    template = TEMPLATES[name].read_text(encoding="utf-8")
    made = PreTrainedTokenizerFast(tokenizer_object=byte_words(), bos_token="<|bos|>", eos_token="<|eos|>")
    found = dict.fromkeys(SPECIAL.findall(template + "<|end|><|user|><|observation|><|call|><turn|><|tool_response>"))
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in found], special_tokens=True)
    made.chat_template = template
    return made


def encoder_of(tokenizer: Any, tools: bool) -> Continuation:
    shown = {"chat_arguments": {"tools": TOOLS}} if tools else {}
    return reply_encoder(tokenizer, DataConfig(path="-", chat=True, now="2026-01-02T00:00:00", **shown))


def check(encode: Continuation, *turns: list[dict[str, Any]]) -> None:
    """Check that the reply in the last turn has the last tokens of the whole conversation, after one that may end the
    model's turn."""
    with _fixed_time(encode.template.now):
        tokens = encode.tokenizer.apply_chat_template(
            [GO, *(message for turn in turns for message in turn)],
            **{"tools": TOOLS if encode.tools else None, "add_generation_prompt": True, "return_dict": False},
        )
    special = [i for i, token in encode.tokenizer.added_tokens_decoder.items() if token.special]
    earlier = [("", turn) for turn in turns[:-1]]
    found = {end: encode(turns[-1], end, [GO], earlier) for end in special}
    assert any(tokens[-len(reply) - 1 :] == [end, *reply] for end, reply in found.items())


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in IMAGES])
def test_a_reply_is_that_of_the_whole_conversation(name: str) -> None:
    encode = encoder_of(tokenizer_of(name), tools=False)
    for content in ("12", '{"temp": 7}', " x\n", "<b>&"):
        turn = [SAY, {"role": "user", "content": content}]
        check(encode, turn)
        check(encode, turn, turn)


@pytest.mark.parametrize("name", TEMPLATES)
def test_results_of_tools_are_those_of_the_whole_conversation_and_calls_come_back(name: str) -> None:
    """If the template shows tools to the model."""
    from trl.chat_template_utils import add_response_schema

    tokenizer = tokenizer_of(name)
    try:
        encode = encoder_of(tokenizer, tools=True)
    except DataError as error:
        if "does not show tools" in str(error):
            return
        raise
    assert bool(call_reader(encode).fault) == name.startswith(OWN)
    if name not in (*NO_CALLS, "diffusion_gemma", "muse_glimmer"):
        add_response_schema(tokenizer)
        assert call_reader(encode).form == tokenizer.response_template
    calls = [Call("add", {"first": 2}), Call("look_up", {"first": 3, "word": "é"}, "000000002")]
    for number in (1, 1 + call_reader(encode).several):
        for content in ("12", '{"temp": 7}', " x\n", "<b>&"):
            turn = [calling(*calls[:number]), *(call.result(content) for call in calls[:number])]
            check(encode, turn)
            check(encode, turn, turn)
