"""Bits of tokens in transformers' own models, with several threads and numbers of tokens against one token alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import load_script
from torch import Tensor
from transformers import AutoModelForCausalLM

from tlt.models.loading import decoder_for

families = load_script(Path(__file__).parents[2] / "bench" / "families.py")
TOKENS, LAST = 301, 16


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def own_value(layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """Attend to the token alone."""
    return (query + value.repeat_interleave(query.shape[1] // value.shape[1], 1)).flatten(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen2_moe", id="qwen2_moe: the gate of the shared expert has one output"),
        pytest.param("laguna", id="laguna: attention has a gate per head"),
        pytest.param("afmoe", id="afmoe: attention has a gate per value"),
        pytest.param("minimax_m3_vl_text", id="minimax_m3_vl_text: experts have an activation of their own"),
        pytest.param("gpt2", id="gpt2: weights of linear layers are transposed"),
        pytest.param("aria_text", id="aria_text: weights of experts are transposed"),
    ],
)
def test_a_token_has_the_same_bits_alone_on_one_thread(name: str, dtype: torch.dtype) -> None:
    config = families.small_config(name)
    config.update({"intermediate_size": 100, "moe_intermediate_size": 44})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    target = decoder_for(config, dtype, torch.device("cpu"))
    target.load({name: 2 * weight.to(dtype) for name, weight in model.state_dict().items()}, 0)
    tokens, positions = torch.randint(3, 120, (TOKENS, 1)), torch.randint(200, (TOKENS, 1))

    def results(low: int, high: int) -> Tensor:
        hidden = target.forward(tokens[low:high], positions[low:high], own_value)
        return torch.cat([hidden, target.logits(hidden)], dim=-1)

    torch.set_num_threads(1)
    alone = torch.cat([results(i, i + 1) for i in range(TOKENS - LAST, TOKENS)])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for rows in (LAST, 17, 37, 129, TOKENS):
            assert torch.equal(results(TOKENS - rows, TOKENS)[-LAST:], alone), (threads, rows)
