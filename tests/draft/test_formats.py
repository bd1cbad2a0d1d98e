"""Drafters in the formats of other engines. Engines ignore a missing tensor silently. So these tests fix names, shapes
and configs, as vLLM 0.33 and SGLang 0.5 read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import decoder_options
from transformers import CONFIG_MAPPING, LlamaConfig, Qwen3Config

from tlt.draft.drafter_folder import DrafterError
from tlt.draft.eagle import EagleLayer, checkpoint_tensors, eagle_options
from tlt.draft.formats import write_drafter
from tlt.models.families import decoder_options as families_options

TARGET = (
    {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True, "dtype": "float32"}
    | {"eos_token_id": 3}
    | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
)
D, H, K, E, F, V = 8, 4, 2, 4, 12, 7


def a_layer(kind: Any, layers: int = 8) -> EagleLayer:
    torch.manual_seed(0)
    options = decoder_options(num_layers=layers, intermediate_size=F, vocab_size=V)
    return EagleLayer(eagle_options(options, kind, 16))


def written(tmp_path: Path, kind: Any, to: Any, head: bool = True) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    write_drafter(a_layer(kind), TARGET, tmp_path, to, torch.ones(V, D) if head else None)
    return json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}}, 5e5),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}, 1e4),
        (CONFIG_MAPPING["gemma3_text"](num_hidden_layers=8, head_dim=E).to_dict(), 1e4),
    ],
    ids=["yarn", "by layer", "gemma3"],
)
@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_the_exported_rope_is_that_of_training_for_any_family(
    tmp_path: Path, rope: dict[str, Any], theta: float, to: Any
) -> None:
    """It is read by versions of transformers that know rope_parameters, and by those that know rope_theta."""
    write_drafter(a_layer("eagle3"), {"model_type": "granite"} | rope, tmp_path, to)
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["rope_parameters"] == {"rope_type": "default", "rope_theta": theta}
    assert found["rope_theta"] == theta
    assert "rope_scaling" not in found


HALF = {"original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, **HALF},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **HALF},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0, 1.1], "long_factor": [1.0, 1.2], **HALF},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_the_older_fields_alone_define_the_rope_of_the_target(tmp_path: Path, rope: dict[str, Any]) -> None:
    target = Qwen3Config(head_dim=E, max_position_embeddings=4096, rope_parameters={"rope_theta": 5e5, **rope})
    write_drafter(a_layer("eagle1"), target.to_dict(), tmp_path, "vllm")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    assert config.get("rope_scaling", {}).get("rope_type", "default") == rope["rope_type"]
    assert "rope_theta" not in config.get("rope_scaling", {}), "version 4 warns of fields that it does not know there"
    older, wanted = families_options(LlamaConfig(**config)), families_options(target)
    assert torch.equal(older.inv_freq, wanted.inv_freq)
    assert (older.attention_scaling, older.max_positions) == (wanted.attention_scaling, wanted.max_positions)


def test_the_drafter_of_gemma_3_is_trained_with_the_exported_rope() -> None:
    options = families_options(CONFIG_MAPPING["gemma3_text"](num_hidden_layers=8, head_dim=E))
    assert torch.equal(options.inv_freq, 1e4 ** -(torch.arange(0, E, 2, dtype=torch.float32) / E))


def test_engines_draft_with_the_whole_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = written(tmp_path / "whole", "eagle3", "vllm")[1].keys()
    monkeypatch.setattr("tlt.draft.eagle._DRAFT_VOCABULARY", 3)
    assert a_layer("eagle3").vocabulary is not None
    assert written(tmp_path / "some", "eagle3", "vllm")[1].keys() == whole


def shapes(kind: str, prefix: str) -> dict[str, tuple[int, ...]]:
    wide = 2 * D if kind == "eagle3" else D
    attention = {"q_proj": (H * E, wide), "k_proj": (K * E, wide), "v_proj": (K * E, wide), "o_proj": (D, H * E)}
    mlp = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    norms = ["post_attention_layernorm", *(("input_layernorm", "hidden_norm") if kind == "eagle3" else ())]
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, 3 * D if kind == "eagle3" else 2 * D),
        **{f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()},
        **{f"{prefix}.mlp.{name}.weight": shape for name, shape in mlp.items()},
        **{f"{prefix}.{name}.weight": (D,) for name in norms},
    }
    return found | ({"norm.weight": (D,), "lm_head.weight": (V, D)} if kind == "eagle3" else {})


@pytest.mark.parametrize(
    ("kind", "to", "prefix", "more"),
    [
        ("eagle1", "vllm", "layers.0", {}),
        ("eagle1", "sglang", "layers.0", {"fc.bias": (D,)}),
        ("eagle3", "vllm", "midlayer", {}),
        ("eagle3", "sglang", "midlayer", {}),
    ],
)
def test_names_and_shapes_are_those_that_the_engine_reads(
    tmp_path: Path, kind: str, to: str, prefix: str, more: dict[str, tuple[int, ...]]
) -> None:
    _, tensors = written(tmp_path, kind, to)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes(kind, prefix) | more
    assert "fc.bias" not in tensors or not tensors["fc.bias"].any()
    ours = checkpoint_tensors(a_layer(kind))  # type: ignore[arg-type]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in ours.items())


COMMON = (
    {"model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 1, "vocab_size": V}
    | {"num_attention_heads": H, "num_key_value_heads": K, "head_dim": E, "max_position_embeddings": 4096}
    | {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
    | {"hidden_act": "silu", "rms_norm_eps": 1e-6}
    | {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
)
ENDS = {"bos_token_id": None, "eos_token_id": 3, "dtype": "float32", "torch_dtype": "float32"}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 16}


@pytest.mark.parametrize(("to", "name"), [("vllm", "LlamaForCausalLM"), ("sglang", "LlamaForCausalLMEagle")])
def test_the_config_of_eagle1(tmp_path: Path, to: str, name: str) -> None:
    assert written(tmp_path, "eagle1", to)[0] == {"architectures": [name], **COMMON, **ENDS}


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_the_config_of_eagle3_numbers_layers_both_ways(tmp_path: Path, to: str) -> None:
    """hidden_states[2], [4] and [5] of eight layers are 2, 4, 5 in vLLM, and 1, 3, 4 in SGLang, which adds 1."""
    taps = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    assert written(tmp_path, "eagle3", to)[0] == (
        COMMON
        | {**ENDS, **WINDOW, "architectures": ["LlamaForCausalLMEagle3"], "norm_before_residual": False}
        | {"draft_vocab_size": V, "num_aux_hidden_states": 3}
        | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "eagle_config": taps}
    )


def test_without_a_head_the_engine_uses_that_of_the_target(tmp_path: Path) -> None:
    assert "lm_head.weight" not in written(tmp_path, "eagle3", "vllm", head=False)[1]


@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_repeated_layers_are_refused(tmp_path: Path, layers: int, to: Any) -> None:
    """vLLM would sort them and leave one out, and the drafter would read other layers."""
    with pytest.raises(DrafterError, match="seven layers or more"):
        write_drafter(a_layer("eagle3", layers), TARGET, tmp_path, to)
    write_drafter(a_layer("eagle3", 7), TARGET, tmp_path, to)
