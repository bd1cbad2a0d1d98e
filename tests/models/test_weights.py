"""Weights by name: the digest of a state dict, and the engine's private copy."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small import cache_for
from test_decoder import RecordingDecoder
from tiny import decoder_options
from torch import Tensor

from tlt.draft.tree import DraftTree, stack
from tlt.engine.noise import NoiseWindow
from tlt.engine.runner import Runner
from tlt.engine.sampling_table import sampling_tensors
from tlt.models.families import ModelError
from tlt.models.weights import read_safetensors, sha256
from tlt.types import Prompt, Request, Row, SamplingParams

CPU = torch.device("cpu")
OPTIONS = decoder_options(
    vocab_size=11,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=6,
    qk_norm=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tied=False,
    max_positions=16,
    inv_freq=torch.tensor([1.0, 0.1]),
)


def policy_state() -> dict[str, Tensor]:
    """Return random tensors, all that the options above require."""
    layer, generator = "model.layers.0.", torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (11, 8),
        "lm_head.weight": (11, 8),
        "model.norm.weight": (8,),
        layer + "input_layernorm.weight": (8,),
        layer + "post_attention_layernorm.weight": (8,),
        layer + "self_attn.q_norm.weight": (4,),
        layer + "self_attn.k_norm.weight": (4,),
    }
    for name, rows, columns in (("q", 8, 8), ("k", 4, 8), ("v", 4, 8), ("o", 8, 8)):
        shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, columns)
        shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
    for name, rows, columns in (("gate", 6, 8), ("up", 6, 8), ("down", 8, 6)):
        shapes[f"{layer}mlp.{name}_proj.weight"] = (rows, columns)
        shapes[f"{layer}mlp.{name}_proj.bias"] = (rows,)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def logits(decoder: RecordingDecoder) -> Tensor:
    """Return the logits after the tokens 1, 2, 3."""
    cache, noise = cache_for(decoder, 10_000), NoiseWindow(1, OPTIONS.vocab_size, 1, CPU)
    cache.reserve(1, 8)
    noise.append(Row(Request(Prompt(0, "", (1,)), 0, 0, 0, SamplingParams(max_new_tokens=10**6))), kept=0)
    noise.prepare([0], 0)
    runner = Runner(decoder, cache, window=None, prefill_tokens=8)
    runner.prefill(0, [[1, 2, 3]])
    runner.verify(
        stack([DraftTree([3])], CPU), [2], noise, torch.tensor([0]), sampling_tensors([SamplingParams()], CPU)
    )
    return decoder.last


# -- the digest --------------------------------------------------------------------------------------------------------


def test_the_digest_does_not_depend_on_the_order_of_the_dict_or_on_strides() -> None:
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    assert sha256(state) == sha256(dict(reversed(state.items())))
    assert sha256(state) == sha256({"a": torch.arange(6.0).view(2, 3).T.contiguous().T, "b": torch.ones(2)})


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


def test_the_digest_of_a_square_matrix_differs_from_that_of_its_transpose() -> None:
    square = torch.arange(9.0).view(3, 3)
    shared, apart = {"a": square, "b": square.T}, {"a": square, "b": square.T.clone()}
    assert sha256(shared) == sha256(apart)


def test_the_digest_is_over_name_dtype_shape_and_little_endian_bytes_in_order_of_names() -> None:
    spelled = (
        b"n torch.int64 []" + bytes([3, 0, 0, 0, 0, 0, 0, 0]) + b"w torch.bfloat16 [2]" + bytes.fromhex("803f00c0")
    )
    state = {"w": torch.tensor([1.0, -2.0], dtype=torch.bfloat16), "n": torch.tensor(3)}
    assert sha256(state) == hashlib.sha256(spelled).hexdigest()


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_later_change_of_the_policy_reaches_the_engine_only_by_load() -> None:
    state = policy_state()
    decoder = RecordingDecoder(OPTIONS, torch.float64, CPU)
    decoder.load(state, version=1)
    before = logits(decoder)
    for tensor in state.values():
        tensor.add_(0.5)
    torch.testing.assert_close(logits(decoder), before, rtol=0, atol=0)
    decoder.load(state, version=2)
    assert decoder.version == 2
    assert float((logits(decoder) - before).abs().max()) > 0.01


def test_a_load_that_fails_keeps_the_old_weights_and_version() -> None:
    state = policy_state()
    decoder = RecordingDecoder(OPTIONS, torch.float64, CPU)
    decoder.load(state, version=1)
    before = logits(decoder)
    broken = {name: tensor + 1 for name, tensor in state.items() if name != "model.norm.weight"}
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        decoder.load(broken, version=2)
    assert decoder.version == 1
    torch.testing.assert_close(logits(decoder), before, rtol=0, atol=0)


def test_an_unknown_weight_is_refused_by_name() -> None:
    """Old Llama checkpoints have buffers of the rotary embedding, which are no weights."""
    state, decoder = policy_state(), RecordingDecoder(OPTIONS, torch.float64, CPU)
    decoder.load(state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}, version=1)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.extra\.weight, which the rollout decoder does not know"):
        decoder.load(state | {"model.layers.0.extra.weight": torch.ones(1)}, version=2)
    assert decoder.version == 1


def test_the_decoder_keeps_its_own_dtype() -> None:
    state = policy_state()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        decoder = RecordingDecoder(OPTIONS, dtype, CPU)
        decoder.load({name: tensor.float() for name, tensor in state.items()}, version=0)
        assert logits(decoder).dtype == dtype


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_the_weights_is_used_even_if_the_config_ties_it(tied: bool) -> None:
    """transformers unties such a model too, and only logs a warning."""
    state = policy_state()
    decoder = RecordingDecoder(replace(OPTIONS, tied=tied), torch.float64, CPU)
    decoder.load(state, version=0)
    torch.testing.assert_close(decoder.head, state["lm_head.weight"], rtol=0, atol=0)
    assert float((logits(decoder) - logits(loaded(state | {"lm_head.weight": embedding(state)}))).abs().max()) > 0.1


@pytest.mark.parametrize("stored", ["no head", "the same memory", "a copy"])
def test_a_tied_head_is_the_embedding_and_takes_no_memory(stored: str) -> None:
    state = policy_state()
    del state["lm_head.weight"]
    heads = {"the same memory": embedding(state), "a copy": embedding(state).clone()}
    decoder = RecordingDecoder(replace(OPTIONS, tied=True), torch.float64, CPU)
    decoder.load(state | ({"lm_head.weight": heads[stored]} if stored != "no head" else {}), version=0)
    assert decoder.head is decoder.embedding
    expected = logits(loaded(state | {"lm_head.weight": embedding(state)}))
    torch.testing.assert_close(logits(decoder), expected, rtol=0, atol=0)


class Gathers(dict[str, Tensor]):
    """Weights that are assembled one by one as they are read. A tensor that nobody keeps is freed before the next."""

    def __getitem__(self, name: str) -> Tensor:
        self.read = [*getattr(self, "read", ()), name]
        return super().__getitem__(name).clone()


@pytest.mark.parametrize("repeat", range(4))
def test_weights_assembled_while_they_are_read_keep_their_head(repeat: int) -> None:
    state = policy_state()
    decoder = RecordingDecoder(replace(OPTIONS, tied=True), torch.float64, CPU)
    decoder.load(Gathers(state), version=0)
    torch.testing.assert_close(decoder.head, state["lm_head.weight"], rtol=0, atol=0)
    gathers = Gathers(state | {"lm_head.weight": embedding(state)})
    decoder.load(gathers, version=0)
    assert decoder.head is decoder.embedding
    assert gathers.read.count("lm_head.weight") == 2, "whoever else gathers it reads it as often"


def test_the_digest_of_weights_assembled_while_they_are_read_covers_all() -> None:
    state = {str(i): torch.full((1000,), float(i)) for i in range(8)}
    assert sha256(Gathers(state)) == sha256(state)


def test_a_tied_head_of_another_shape_is_refused() -> None:
    decoder = RecordingDecoder(replace(OPTIONS, tied=True), torch.float64, CPU)
    with pytest.raises(ModelError, match=r"lm_head\.weight.*\[7, 8\].*\[11, 8\]"):
        decoder.load(policy_state() | {"lm_head.weight": torch.ones(7, 8)}, version=0)


def loaded(state: dict[str, Tensor]) -> RecordingDecoder:
    decoder = RecordingDecoder(OPTIONS, torch.float64, CPU)
    decoder.load(state, version=0)
    return decoder


def embedding(state: dict[str, Tensor]) -> Tensor:
    return state["model.embed_tokens.weight"]


def test_reading_gives_the_tensors_that_were_saved_bit_for_bit(tmp_path: Path) -> None:
    state = policy_state() | {"half": torch.randn(3).bfloat16()}
    save_file(state, tmp_path / "model.safetensors")
    assert sha256(read_safetensors(tmp_path)) == sha256(state)
