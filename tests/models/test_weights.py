"""Weights by name: the digest of a state dict, and the engine's private copy."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import qwen3
from torch import Tensor

from tlt.models import product
from tlt.models.decoder import Decoder
from tlt.models.families import ModelError, decoder_options
from tlt.models.weights import read_safetensors, sha256

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


def test_the_digest_does_not_depend_on_the_order_of_the_dict_or_on_strides() -> None:
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    assert sha256(state) == sha256(dict(reversed(state.items())))
    assert sha256(state) == sha256({"a": torch.arange(6.0).view(2, 3).T.contiguous().T, "b": torch.ones(2)})
    square = torch.arange(9.0).view(3, 3)
    assert sha256({"a": square, "b": square.T}) == sha256({"a": square, "b": square.T.clone()})


@pytest.mark.parametrize(
    "other",
    [
        {"renamed": torch.arange(6.0)},
        {"a": torch.arange(6.0).double()},
        {"a": torch.arange(6.0).view(2, 3)},
        {"a": torch.arange(6.0).view(torch.int32)},
        {"a": torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.000001])},
        {"a": torch.tensor([-0.0, 1.0, 2.0, 3.0, 4.0, 5.0])},
        {"a": torch.arange(6.0), "b": torch.zeros(0)},
        {},
    ],
    ids=["name", "dtype", "shape", "dtype with the same bytes", "one value", "one sign bit", "one more", "none"],
)
def test_the_digest_depends_on_each_property(other: dict[str, Tensor]) -> None:
    assert sha256(other) != sha256({"a": torch.arange(6.0)})


def test_the_digest_counts_tied_tensors_once_and_only_those() -> None:
    table = torch.randn(4, 3)
    tied = {"embed": table, "head": table}
    assert sha256(tied) == sha256({"embed": table})
    assert sha256({"embed": table, "head": table.clone()}) != sha256(tied)


def test_the_digest_is_over_name_dtype_shape_and_little_endian_bytes_in_order_of_names() -> None:
    spelled = (
        b"n torch.int64 []" + bytes([3, 0, 0, 0, 0, 0, 0, 0]) + b"w torch.bfloat16 [2]" + bytes.fromhex("803f00c0")
    )
    state = {"w": torch.tensor([1.0, -2.0], dtype=torch.bfloat16), "n": torch.tensor(3)}
    assert sha256(state) == hashlib.sha256(spelled).hexdigest()


has_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=has_onednn)])
def test_a_later_change_of_the_policy_reaches_the_engine_only_by_load(
    monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(product, "packed_from", lambda *key: 1 if packed else product.NEVER)
    state = {name: tensor.float() for name, tensor in policy_state().items()}
    decoder = loaded(state, torch.float32)
    before = logits(decoder)
    for tensor in state.values():
        tensor.add_(0.5)
    assert torch.equal(logits(decoder), before)
    decoder.load(state, version=2)
    assert decoder.version == 2
    assert torch.equal(logits(decoder), logits(loaded(state, torch.float32)))
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


def test_an_unknown_weight_is_refused_by_name() -> None:
    """Old Llama checkpoints have buffers of the rotary embedding, which are no weights."""
    decoder = loaded(policy_state() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)})
    with pytest.raises(ModelError, match=r"model\.layers\.0\.extra\.weight, which the rollout decoder does not know"):
        decoder.load(policy_state() | {"model.layers.0.extra.weight": torch.ones(1)}, version=2)
    assert decoder.version == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_decoder_keeps_its_own_dtype(dtype: torch.dtype) -> None:
    state = {name: tensor.float() for name, tensor in policy_state().items()}
    assert logits(loaded(state, dtype)).dtype == dtype


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_the_weights_is_used_even_if_the_config_ties_it(tied: bool) -> None:
    """transformers unties such a model too, and only logs a warning."""
    state = policy_state()
    decoder = loaded(state, tied=tied)
    assert torch.equal(decoder.head, state["lm_head.weight"])
    assert float((logits(decoder) - logits(loaded(state | {"lm_head.weight": embedding(state)}))).abs().max()) > 0.1


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


def test_reading_gives_the_tensors_that_were_saved_bit_for_bit(tmp_path: Path) -> None:
    state = policy_state() | {"half": torch.randn(3).bfloat16()}
    save_file(state, tmp_path / "model.safetensors")
    assert sha256(read_safetensors(tmp_path)) == sha256(state)
