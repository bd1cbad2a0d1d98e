"""The rollout decoder against transformers' full forward pass: random checkpoints of every family and kind of RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import cache_for, widen
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tlt.engine.runner import NewTokens, Runner
from tlt.models.decoder import Decoder, RMSNorm
from tlt.models.families import decoder_options, read_config
from tlt.models.weights import read_safetensors

CPU = torch.device("cpu")
VOCAB = 61
FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 32},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.2}
    | {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [2.0, 4.0, 6.0, 8.0]},
}


def rope(kind: str, theta: float = 10_000.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **ROPES[kind]}}


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    **{f"llama {kind}": rope(kind) for kind in ROPES},
    "mistral": {"sliding_window": None},
    "mistral window": {"sliding_window": 64, "num_key_value_heads": 1},
    "mistral yarn": rope("yarn") | {"head_dim": 16},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2 window": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "qwen3 tied": {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3 biases": {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 4},
}


def checkpoint(folder: Path, variant: str) -> nn.Module:
    """Save a tiny model in which every weight, bias and norm matters, in several files. Return transformers' own
    float32 model."""
    torch.manual_seed(len(variant))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    changes = {"vocab_size": VOCAB, **sizes, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = AutoModelForCausalLM.from_config(FAMILIES[variant.split()[0]](**(changes | VARIANTS[variant]))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return model


def reference(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """Return logits [T, V] of a full forward pass without a cache."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0]


class Rows:
    """Batch of contexts, decoded with the engine's own runner and cache."""

    def __init__(self, folder: Path, dtype: torch.dtype, contexts: Sequence[Sequence[int]]) -> None:
        self.decoder = Decoder(decoder_options(read_config(folder)), dtype, CPU)
        self.decoder.load(read_safetensors(folder), version=0)
        cache = cache_for(self.decoder, 100_000)
        cache.reserve(len(contexts), max(map(len, contexts)) + 40)
        self.runner = Runner(self.decoder, cache, None, prefill_tokens=2048)
        self.runner.prefill(0, contexts)
        self.lengths = [len(context) - 1 for context in contexts]

    def logits(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Compute one target pass over new tokens of each row. Nothing is committed."""
        new = NewTokens.of(tokens, CPU)
        (hidden,) = self.runner._pass(0, new, self.lengths)
        return self.decoder.logits(new.pad(hidden.flatten(0, 1)))


def some_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*((variant, torch.float64) for variant in VARIANTS), *((family, torch.float32) for family in FAMILIES)],
    ids=str,
)
def test_ragged_prefill_cached_decode_and_drafts_equal_a_full_forward(
    tmp_path: Path, variant: str, dtype: torch.dtype
) -> None:
    model = checkpoint(tmp_path, variant)
    model = widen(model.double()) if dtype == torch.float64 else model
    texts = [some_tokens(length + 3, length) for length in (1, 19, 6)]
    rows = Rows(tmp_path, dtype, [text[:-2] for text in texts])
    want = [reference(model, text) for text in texts]
    assert max(float(w.abs().max()) for w in want) > 1, "the tolerance is absolute"
    close = partial(torch.testing.assert_close, atol=1e-4 if dtype == torch.float32 else 1e-11, rtol=0)
    for step in (-3, -2):
        got = rows.logits([[text[step]] for text in texts])
        close(got[:, 0], torch.stack([w[step] for w in want]))
        rows.lengths = [length + 1 for length in rows.lengths]
    drafts = [some_tokens(size, size) for size in (8, 0, 4)]
    got = rows.logits([[text[-1], *draft] for text, draft in zip(texts, drafts, strict=True)])
    for row, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
        close(got[row, : len(draft) + 1], reference(model, text + draft)[len(text) - 1 :])


@pytest.mark.parametrize("variant", ["llama biases", "mistral yarn", "qwen2", "qwen3"])
def test_bfloat16_is_as_close_to_float32_as_in_transformers(tmp_path: Path, variant: str) -> None:
    model = checkpoint(tmp_path, variant)
    texts = [some_tokens(length, length) for length in (5, 12, 30)]
    exact = torch.stack([reference(model, text)[-1] for text in texts])
    theirs = torch.stack([reference(model.bfloat16(), text)[-1] for text in texts]).float()
    ours = Rows(tmp_path, torch.bfloat16, texts).logits([[text[-1]] for text in texts])
    assert ours.dtype == torch.bfloat16
    error, allowed = (ours[:, 0].float() - exact).norm(), (theirs - exact).norm()
    assert error < 1.5 * allowed
    assert error < 0.1 * exact.norm()


@pytest.mark.parametrize("size", [8, 64, 300])
def test_a_norm_of_bfloat16_is_rounded_once(size: int) -> None:
    """The reference is torch's norm in float64, rounded at the end. One number in a hundred may differ in the last
    place, at a tie."""
    generator = torch.Generator().manual_seed(size)
    x, weight = (torch.randn(n, size, generator=generator).bfloat16() for n in (200, 1))
    norm = RMSNorm(weight[0], 1e-5)
    for ours, factor in ((norm(x), weight[0].double()), (norm.unit(x), torch.ones(size).double() / size**0.5)):
        want = F.rms_norm(x.double(), (size,), factor, 1e-5).bfloat16()
        assert ours.dtype == torch.bfloat16
        assert (ours != want).double().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_norm_of_a_row_has_the_same_bits_among_any_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2**16, 8, generator=generator, dtype=torch.float64).to(dtype)
    norm = RMSNorm(torch.ones(8, dtype=dtype), 1e-2)
    assert torch.equal(norm(x), torch.cat([norm(rows) for rows in x.split(12)]))
