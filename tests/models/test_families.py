"""Models that are loaded or refused. Each error is one sentence that names the cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options, read_config
from tlt.models.model_folder import ModelError
from tlt.models.weights import read_safetensors, sha256

CPU = torch.device("cpu")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a valid checkpoint, for a test to change."""
    sizes: dict[str, Any] = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(max_position_embeddings=64, num_attention_heads=2, num_key_value_heads=1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def load(folder: Path) -> Decoder:
    decoder = Decoder(decoder_options(read_config(folder)), torch.float32, CPU)
    decoder.load(read_safetensors(folder), version=0)
    return decoder


def refusal(folder: Path) -> str:
    """Return the one-line error for this folder."""
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **changes)


def weight(name: str, *shape: int) -> Callable[[Path], None]:
    """Return a change that sets a weight to ones."""
    return lambda folder: save_file(load_file(folder / WEIGHTS) | {name: torch.ones(shape)}, folder / WEIGHTS)


def index(content: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(content)

    return replace


def rope(**parameters: Any) -> Callable[[Path], None]:
    return config(rope_parameters={"rope_theta": 1e4, **parameters})


REFUSED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no model type": (config(model_type=None), ["None"]),
    "JSON that is not text": (lambda folder: (folder / "config.json").write_bytes(b"\x80"), ["not valid JSON"]),
    "another activation": (config(hidden_act="gelu"), ["'gelu'", "silu"]),
    "null for a number": (config(num_hidden_layers=None), []),
    "unknown rope": (rope(rope_type="spiral"), []),
    "rope without its factor": (rope(rope_type="linear"), []),
    "odd split of heads": (config(num_attention_heads=3), []),
    # if these were ignored, the engine would decode from another distribution than the policy's
    "attention that is not causal": (config(is_causal=False), ["is_causal"]),
    "quantized weights": (config(quantization_config={"quant_method": "fp8"}), ["quantization_config"]),
    "weights of another name": (config(transformers_weights="other.safetensors"), ["transformers_weights"]),
    "a window of nothing": (config(model_type="mistral", sliding_window=0), ["sliding_window"]),
    "layers without their window": (
        config(model_type="qwen2", layer_types=["sliding_attention"], sliding_window=None),
        ["layer_types"],
    ),
    "layers of another kind": (config(model_type="qwen2", layer_types=["chunked_attention"]), ["chunked_attention"]),
    "a rope that turns a part of each head": (
        rope(rope_type="linear", factor=2.0, partial_rotary_factor=0.25),
        ["partial_rotary_factor"],
    ),
    "too few positions": (
        config(max_position_embeddings=2),
        ["2 for max_position_embeddings: give a whole number of at least 3"],
    ),
    "no layers": (config(num_hidden_layers=0), ["0 for num_hidden_layers: give a whole number of at least 1"]),
    "too small a window": (
        config(model_type="mistral", sliding_window=1),
        ["1 for sliding_window: give a whole number of at least 3"],
    ),
    "a tensor of another shape": (weight("model.norm.weight", 5), ["model.norm.weight", "[5]", "[16]"]),
    "a tensor too many": (weight("model.layers.0.self_attn.q_proj.bias", 16), ["model.layers.0.self_attn.q_proj.bias"]),
    "a pickle file": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        [WEIGHTS, "safetensors only"],
    ),
    "an empty weights file": (lambda folder: (folder / WEIGHTS).write_bytes(b""), ["is damaged"]),
    **{
        f"index {content}": (index(content), [INDEX])
        for content in ("{", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}')
    },
    "an index without its file": (index('{"weight_map": {"a": "b.safetensors"}}'), ["b.safetensors"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_folder_is_refused_in_one_sentence(folder: Path, case: str) -> None:
    spoil, named = REFUSED[case]
    spoil(folder)
    message = refusal(folder)
    assert all(part in message for part in named)


def test_code_of_the_folder_is_never_run(folder: Path) -> None:
    proof = folder.parent / "ran"
    (folder / "evil.py").write_text(f"open({str(proof)!r}, 'w')\nclass EvilConfig: ...\n")
    change_config(folder, auto_map={"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilConfig"})
    assert "auto_map" in refusal(folder)
    assert not proof.exists()


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    weight("model.layers.0.self_attn.rotary_emb.inv_freq", 4)(folder)
    load(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "{outside}", "sub/../../outside.safetensors", ".", ""])
def test_an_index_that_points_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / "sub").mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name.format(outside=outside)}}))
    assert "no weights file" in refusal(folder)


def test_a_single_file_is_preferred_to_an_index_like_in_transformers(folder: Path) -> None:
    """An earlier save left the index with its shards."""
    shard = "model-00001-of-00001.safetensors"
    (folder / WEIGHTS).rename(folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(folder / shard), shard)}))
    save_file({name: tensor + 1 for name, tensor in load_file(folder / shard).items()}, folder / WEIGHTS)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert sha256(read_safetensors(folder)) == sha256(theirs)


def test_a_snapshot_of_the_hub_cache_loads(folder: Path) -> None:
    """The files of a snapshot there are links to blobs in another folder."""
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / file.name)
    load(snapshot)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 48, "factor": 4.0}
LIMITS: dict[str, tuple[int, dict[str, Any]]] = {
    "max_position_embeddings": (48, {"max_position_embeddings": 48}),
    "sliding window": (48, {"model_type": "mistral", "sliding_window": 48}),
    "original length of longrope": (
        48,
        {
            "max_position_embeddings": 192,
            "rope_parameters": LONGROPE | {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
        },
    ),
    "original length of longrope in layers of one type": (
        48,
        {
            "model_type": "gemma3_text",
            "max_position_embeddings": 192,
            "head_dim": 8,
            "rope_parameters": {
                "full_attention": LONGROPE | {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    **{
        f"window of {kind} {name}": (limit, {"model_type": kind, "sliding_window": 48, "head_dim": 8} | changes)
        for kind in ("qwen2", "qwen3")
        for name, limit, changes in (
            ("in use", 48, {"use_sliding_window": True, "max_window_layers": 0}),
            ("switched off", 64, {"use_sliding_window": False}),
            ("of layers beyond the last", 64, {"use_sliding_window": True, "max_window_layers": 1}),
            ("of no layer by name", 64, {"use_sliding_window": True, "layer_types": ["full_attention"]}),
        )
    },
}


@pytest.mark.parametrize("case", LIMITS)
def test_the_longest_sequence_of_a_model(folder: Path, case: str) -> None:
    limit, changes = LIMITS[case]
    change_config(folder, **changes)
    assert decoder_options(read_config(folder)).max_positions == limit


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_config_keys_that_the_family_does_not_have_are_ignored(folder: Path, family: str) -> None:
    """transformers ignores them, so such a checkpoint has no weights for them."""
    change_config(folder, model_type=family, mlp_bias=True, attention_bias=family != "qwen3")
    options = decoder_options(read_config(folder))
    assert (options.qkv_bias, options.out_bias, options.mlp_bias) == (family == "qwen2", False, False)


def test_for_the_folder_of_a_run_the_error_names_the_policy_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_00000004" / "policy").mkdir(parents=True)
    (tmp_path / "config.json").write_text('{"model": {"path": "base"}}')
    with pytest.raises(ModelError, match=r"is the folder of a run: give .*step_00000004/policy"):
        read_config(tmp_path)


@pytest.mark.parametrize("pad", [31, 5000, -32])
def test_a_padding_token_beyond_the_vocabulary_is_named_but_minus_1_is_accepted(tmp_path: Path, pad: int) -> None:
    Qwen3Config(vocab_size=31, pad_token_id=-1).save_pretrained(tmp_path)
    assert read_config(tmp_path).pad_token_id == -1
    change_config(tmp_path, pad_token_id=pad)
    with pytest.raises(ModelError, match=rf"pad_token_id = {pad}, beyond its vocabulary of 31: set it to null"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_a_model_with_parts_for_images_is_refused_with_the_type_of_its_text_part(tmp_path: Path, name: str) -> None:
    CONFIG_MAPPING[name]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"type {name} have other parts than text, .* a model of type {name}_text$"):
        read_config(tmp_path)
