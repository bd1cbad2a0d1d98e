"""Stop strings against those of transformers, over byte-level and byte-fallback vocabularies with special tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import qwen3
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

import tlt
from tlt.engine.committing import Stops
from tlt.spelling import Detokenizer
from tlt.types import Prompt, Request, Row, SamplingParams

SPECIAL = ["<|im_end|>", "<|end|>"]
STOPS = (
    *("ab", "aba", "b<|im_end|>", "<|im_end|>a", "<|im_end|><|end|>", "a<|end|>b", "<|im", " a", "é", "aé", "日"),
    *("é日b", "\n\n", "a b", "ab ab", " <|end|>"),
)


def byte_level() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("b", "Ã"), ("©", "æ"), ("Ċ", "Ċ")]  # some tokens hold parts of two characters
    words = Tokenizer(models.BPE({piece: i for i, piece in enumerate([*alphabet, *map("".join, merges)])}, merges))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    return with_specials(words)


def byte_fallback(more: str = "") -> Any:
    """Return a tokenizer like Llama 2's. Its decoder strips the first space of a text, and joins bytes only if all are
    valid."""
    merges = [("▁", "a"), ("a", "b"), ("é", "▁")]
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefé\n", *more, *map("".join, merges)]
    words = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True))
    words.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words.decoder = decoders.Sequence(steps)
    return with_specials(words)


def with_specials(words: Tokenizer) -> Any:
    words.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=words)


def first_stop(stops: Stops, tokens: list[int], strings: tuple[str, ...]) -> int | None:
    """Return the number of tokens of a response when it stops."""
    row = Row(Request(Prompt(0, "", (0,)), 0, 0, 0, SamplingParams(max_new_tokens=10**9, stop_strings=strings)))
    return len(row.tokens) if stops.append(row, tokens) else None


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_random_tokens_stop_where_transformers_stops(make: Any) -> None:
    tokenizer, draw = make(), random.Random(0)
    pieces = ["a", "b", "ab", "▁a", "Ġa", "▁", "Ġ", "Ċ", "ĊĊ", "é", "é▁", "Ã", "©", "bÃ", "©æ", "æ", "Ĺ", "¥", "\n"]
    pieces += [*SPECIAL, "<0xC3>", "<0xA9>", "<0xE6>", "<0x97>", "<0xA5>", "<0x0A>", "<", "|", "i", "m"]
    known = [token for token in map(tokenizer.get_vocab().get, pieces) if token is not None]
    known.append(len(tokenizer) + 3)  # a row of the embedding that the tokenizer does not use
    stops, ended = Stops(Detokenizer(tokenizer)), 0
    for strings in [(stop,) for stop in STOPS] + [tuple(draw.sample(STOPS, 3)) for _ in range(8)]:
        criteria = StopStringCriteria(tokenizer, list(strings))
        for _ in range(25):
            tokens = draw.choices(known, k=30)
            places = (n for n in range(1, 31) if criteria(torch.tensor([tokens[:n]]), None).item())
            wanted = next(places, None)
            assert first_stop(stops, tokens, strings) == wanted, (strings, tokenizer.convert_ids_to_tokens(tokens))
            ended += wanted is not None
    assert ended > 100


def test_a_token_may_be_the_replacement_character_itself() -> None:
    """Llama 2's vocabulary has such a token. It is then no sign of an incomplete character."""
    tokenizer = byte_fallback("\N{REPLACEMENT CHARACTER}")
    spell = Detokenizer(tokenizer).spell
    assert spell(tokenizer.get_vocab()["\N{REPLACEMENT CHARACTER}"]) == b"\xef\xbf\xbd"
    assert spell(tokenizer.get_vocab()["<0xEF>"]) == b"\xef"


def test_an_empty_stop_string_is_refused() -> None:
    """It would end every response at its first token."""
    with pytest.raises(ValueError, match=r"stop_strings contains an empty string: remove it"):
        SamplingParams(stop_strings=("</answer>", ""))


@pytest.mark.parametrize(
    ("text", "stop", "seen"),
    [
        ("日日日日本日", "本", "日日日日本"),  # a run of bytes, each of three to a character
        ("ab<|im_end|>ab", "<|im_end|>", "ab"),
        ("a<|end|>b ab", "ab", "ab ab"),
        ("ab\n<|im_end|>", "\n<|im_end|>", "ab\n"),
        ("ab " * 30 + "日b and more", "ab " * 11 + "日b", "ab " * 30 + "日b"),  # long and late
    ],
)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_text_keeps_stop_strings_but_no_special_tokens(make: Any, text: str, stop: str, seen: str) -> None:
    tokenizer = make()
    tokens = [token for piece in text for token in tokenizer(piece)["input_ids"]] if "<" not in text else None
    tokens = tokens or tokenizer(text)["input_ids"]
    detokenize = Detokenizer(tokenizer)
    end = first_stop(Stops(detokenize), tokens, (stop,))
    assert detokenize(tokens[:end]) == seen


def test_a_model_that_decodes_greedily_stops_where_transformers_stops(tmp_path: Path) -> None:
    tokenizer = byte_level()
    model = qwen3(2, vocab_size=len(tokenizer), eos_token_id=None, bos_token_id=None, initializer_range=0.5)
    heard = tokenizer.convert_tokens_to_ids(["a", "b", "ab", "Ġa", "Ã", "©", *SPECIAL])
    with torch.no_grad():
        model.lm_head.weight[[i for i in range(len(tokenizer)) if i not in heard]] = 0
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = tlt.load_engine({"path": str(tmp_path), "dtype": "float64", "device": "cpu"}, {"drafter": "suffix"})
    ended = 0
    for strings in (("é",), ("b<|im_end|>", "a a"), ("<|end|>", "bb"), ("ab ab", "<|im_end|>a", "Ã")):
        sampling = SamplingParams(temperature=0.0, max_new_tokens=40, stop_strings=strings)
        prompts = [Prompt(i, "", (i,)) for i in range(0, 250, 25)]
        for response in engine.generate(tlt.make_requests(prompts, 1, sampling, 0)):
            asked = torch.tensor([response.request.prompt.token_ids])
            how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
            stops: dict[str, Any] = {"stop_strings": list(strings), "tokenizer": tokenizer}
            wanted = model.generate(asked, attention_mask=torch.ones_like(asked), **how, **stops)
            assert response.token_ids == wanted[0, 1:].tolist(), strings
            ended += response.finish_reason == "stop"
    assert 5 < ended < 40
