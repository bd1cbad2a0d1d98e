"""Weights by name: the digest of a state dict, and the engine's private copy."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import qwen3
from torch import Tensor

from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options
from tlt.models.model_folder import ModelError
from tlt.models.weights import num_weights, sha256

CPU = torch.device("cpu")
MODEL = qwen3(vocab_size=11, num_hidden_layers=1, attention_bias=True, max_position_embeddings=16)
OPTIONS = decoder_options(MODEL.config)


def policy_state() -> dict[str, Tensor]:
    """Return random tensors, all that the options above require."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in MODEL.state_dict().items()
    }


def loaded(state: dict[str, Tensor], dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    decoder = Decoder(replace(OPTIONS, **changes), dtype, CPU)
    decoder.load(state, version=1)
    return decoder


def logits(decoder: Decoder) -> Tensor:
    """Return logits after the tokens 1, 2, 3, each of which attends to itself alone."""
    return decoder.logits(decoder.forward(torch.tensor([[1, 2, 3]]), torch.arange(3)[None], itself))


def itself(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    share = OPTIONS.num_heads // OPTIONS.num_kv_heads
    return (query * (key + value).repeat_interleave(share, dim=1)).flatten(1)


def test_the_digest_is_over_name_dtype_shape_and_little_endian_bytes_in_order_of_names() -> None:
    """Strides do not count. A tensor and its transpose are two, although they share memory."""
    spelled = b"n torch.int64 []" + (3).to_bytes(8, "little") + b"w torch.bfloat16 [2, 1]" + bytes.fromhex("803f0080")
    state = {"w": torch.tensor([[1.0, -0.0]]).bfloat16().T, "n": torch.tensor(3)}
    assert sha256(state) == hashlib.sha256(spelled).hexdigest()
    square = torch.arange(9.0).view(3, 3)
    assert sha256({"a": square, "b": square.T}) == sha256({"a": square, "b": square.T.clone()})


def test_the_number_of_weights_is_the_sum_over_all_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "x.safetensors")
    save_file({"c": torch.zeros(2, 2, 2)}, tmp_path / "y.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert num_weights(tmp_path) == 15 + 7 + 8


def test_the_digest_counts_tied_tensors_once_and_only_those() -> None:
    table = torch.randn(4, 3)
    tied = {"embed": table, "head": table}
    assert sha256(tied) == sha256({"embed": table})
    assert sha256({"embed": table, "head": table.clone()}) != sha256(tied)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_later_change_of_the_policy_reaches_the_engine_only_by_load(dtype: torch.dtype) -> None:
    """Products in float32 are packed, those in float64 are not."""
    state = {name: tensor.to(dtype) for name, tensor in policy_state().items()}
    decoder = loaded(state, dtype)
    before = logits(decoder)
    for tensor in state.values():
        tensor.add_(0.5)
    assert torch.equal(logits(decoder), before)
    decoder.load(state, version=2)
    assert decoder.version == 2
    assert torch.equal(decoder.head, state["lm_head.weight"])
    assert torch.equal(logits(decoder), logits(loaded(state, dtype)))
    assert float((logits(decoder) - before).abs().max()) > 0.01


def test_a_load_that_fails_keeps_the_old_weights_and_version() -> None:
    state = policy_state()
    decoder = loaded(state)
    before = logits(decoder)
    broken = {name: tensor + 1 for name, tensor in state.items() if name != "model.norm.weight"}
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        decoder.load(broken, version=2)
    assert decoder.version == 1
    assert torch.equal(logits(decoder), before)


@pytest.mark.parametrize("stored", ["no head", "the same memory", "a copy"])
def test_a_tied_head_is_the_embedding_and_takes_no_memory(stored: str) -> None:
    state = policy_state()
    del state["lm_head.weight"]
    heads = {"the same memory": embedding(state), "a copy": embedding(state).clone()}
    decoder = loaded(state | ({"lm_head.weight": heads[stored]} if stored != "no head" else {}), tied=True)
    assert decoder.head is decoder.embedding
    assert torch.equal(logits(decoder), logits(loaded(state | {"lm_head.weight": embedding(state)})))


class Gathers(dict[str, Tensor]):
    """Weights that are assembled one by one as they are read. A tensor that nobody keeps is freed before the next."""

    def __getitem__(self, name: str) -> Tensor:
        self.read = [*getattr(self, "read", ()), name]
        return super().__getitem__(name).clone()


@pytest.mark.parametrize("repeat", range(4))
def test_weights_assembled_while_they_are_read_keep_their_head(repeat: int) -> None:
    state = policy_state()
    decoder = loaded(Gathers(state), tied=True)
    assert torch.equal(decoder.head, state["lm_head.weight"])
    gathers = Gathers(state | {"lm_head.weight": embedding(state)})
    decoder.load(gathers, version=2)
    assert decoder.head is decoder.embedding
    assert gathers.read.count("lm_head.weight") == 2, "whoever else gathers it reads it as often"


def test_the_digest_of_weights_assembled_while_they_are_read_covers_all() -> None:
    state = {str(i): torch.full((1000,), float(i)) for i in range(8)}
    assert sha256(Gathers(state)) == sha256(state)


def test_a_tied_head_of_another_shape_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lm_head\.weight.*\[7, 32\].*\[11, 32\]"):
        loaded(policy_state() | {"lm_head.weight": torch.ones(7, 32)}, tied=True)


def embedding(state: dict[str, Tensor]) -> Tensor:
    return state["model.embed_tokens.weight"]
