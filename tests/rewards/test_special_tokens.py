"""Rewards receive texts without special tokens, so a reward that looks for one is always 0."""

from __future__ import annotations

from typing import Any

import pytest
from judging import recipe
from tiny import tiny_model
from transformers import AutoTokenizer

from tlt.data.tokenizer import load_tokenizer
from tlt.rewards import RewardError, refuse_special_tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tokenizer with a special token, and with an added token that is not special, like <think> of Qwen 3."""
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|ans|>"]})
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)


def checked(tokenizer: Any, prefill: str = "", **reward: Any) -> None:
    refuse_special_tokens(recipe(reward, prefill=prefill), tokenizer)


@pytest.mark.parametrize("name", ["answer_marker", "answer_end"])
def test_a_marker_that_is_never_found_is_refused(tokenizer: Any, name: str) -> None:
    said = rf"reward\.{name} contains the special token <\|ans\|>, .*: use another text"
    with pytest.raises(RewardError, match=said):
        checked(tokenizer, name="exact", **{name: "<|ans|> "})
    checked(tokenizer, name="exact", **{name: "<think>"})
    checked(tokenizer, name="exact", prefill="<|ans|>", **{name: "<|ans|>"})
