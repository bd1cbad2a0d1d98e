"""Models that are loaded or refused. Each error is one sentence that names the cause."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import cache_for
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tlt.engine.rows import RowTable
from tlt.engine.scheduler import Scheduler
from tlt.models.decoder import Decoder
from tlt.models.families import DecoderOptions, ModelError, decoder_options, read_config
from tlt.models.weights import read_safetensors, sha256
from tlt.types import Prompt, Request, SamplingParams

CPU = torch.device("cpu")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a valid checkpoint, for a test to change."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=13, max_position_embeddings=64, num_key_value_heads=1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


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


def test_a_valid_folder_loads(folder: Path) -> None:
    assert load(folder).version == 0


# -- config.json -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vit", None, 7])
def test_a_model_type_that_is_not_a_causal_language_model_is_refused(folder: Path, kind: Any) -> None:
    change_config(folder, model_type=kind)
    message = refusal(folder)
    assert repr(kind) in message


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)
    assert "there is no folder" in refusal(folder / "not there")


@pytest.mark.parametrize("text", ["{", "", '{"model_type": "llama",}', "\udc80"])
def test_broken_json_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "not valid JSON" in refusal(folder)


def test_json_that_is_not_an_object_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('["llama"]')
    assert "config.json must hold a JSON object, not a list" in refusal(folder)


def test_code_of_the_folder_is_never_run(folder: Path) -> None:
    proof = folder.parent / "ran"
    (folder / "evil.py").write_text(f"open({str(proof)!r}, 'w')\nclass EvilConfig: ...\n")
    change_config(folder, auto_map={"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilConfig"})
    assert "auto_map" in refusal(folder)
    assert not proof.exists()


def test_another_activation_is_refused(folder: Path) -> None:
    change_config(folder, hidden_act="gelu")
    message = refusal(folder)
    assert "'gelu'" in message
    assert "silu" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "sixteen"},
        {"num_hidden_layers": None},
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        {"num_attention_heads": 3},
        {"num_key_value_heads": 0},
    ],
    ids=[
        "a word for a number",
        "null",
        "unknown rope",
        "rope without its factor",
        "odd split of heads",
        "no key heads",
    ],
)
def test_invalid_values_in_the_config_are_refused(folder: Path, changes: dict[str, Any]) -> None:
    change_config(folder, **changes)
    refusal(folder)


DISAGREEING: dict[str, tuple[dict[str, Any], str]] = {
    "attention that is not causal": ({"is_causal": False}, "is_causal"),
    "quantized weights": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "weights of another name": ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
    "a window of nothing": ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
    "a window of less": ({"model_type": "mistral", "sliding_window": -3}, "sliding_window"),
    "layers without their window": (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"], "sliding_window": None},
        "layer_types",
    ),
    "layers of another kind": ({"model_type": "qwen2", "layer_types": ["chunked_attention"]}, "chunked_attention"),
    "a rope that turns a part of each head": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.25}},
        "partial_rotary_factor",
    ),
}


@pytest.mark.parametrize("case", DISAGREEING)
def test_features_that_only_transformers_supports_are_refused(folder: Path, case: str) -> None:
    """If they were ignored, the engine would decode from another distribution than the policy's, or the policy would
    fail later."""
    changes, named = DISAGREEING[case]
    change_config(folder, **changes)
    assert named in refusal(folder)


# -- weights -----------------------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    assert "model.norm.weight" in refusal(folder)


def test_a_wrong_shape_is_named_with_both(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}))
    message = refusal(folder)
    assert "model.norm.weight" in message
    assert "[5]" in message
    assert "[16]" in message


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}))
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(folder)


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickle_files_are_never_read(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    message = refusal(folder)
    assert WEIGHTS in message
    assert "safetensors only" in message


@pytest.mark.parametrize("keep", [0, 4, 100, 2000])
def test_truncated_safetensors_are_refused(folder: Path, keep: int) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:keep])
    assert "is damaged" in refusal(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "{outside}", "sub/../../outside.safetensors", ".", ""])
def test_an_index_that_points_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / "sub").mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name.format(outside=outside)}}))
    assert "no weights file" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(folder: Path, text: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(text)
    assert INDEX in refusal(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / WEIGHTS).rename(folder / names["a"])
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    assert "model-00002-of-00002.safetensors" in refusal(folder)


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


# -- lengths -----------------------------------------------------------------------------------------------------------

LIMITS: dict[str, dict[str, Any]] = {
    "max_position_embeddings": {"model_type": "llama", "max_position_embeddings": 48},
    "sliding window": {"model_type": "mistral", "max_position_embeddings": 64, "sliding_window": 48},
    "sliding window in use": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 48}
    | {"max_window_layers": 0},
    "original length of longrope": {
        "model_type": "llama",
        "max_position_embeddings": 192,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 48}
        | {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    },
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_sequence_longer_than_the_models_limit_is_refused_at_submit(folder: Path, case: str) -> None:
    change_config(folder, **({"max_position_embeddings": 64} | LIMITS[case]))
    options = decoder_options(read_config(folder))
    cache = cache_for(Decoder(options, torch.float32, CPU), 10_000)
    scheduler = Scheduler(RowTable([]), cache, max_rows=4, verify_tokens=8, max_positions=options.max_positions)

    def submit(prompt_tokens: int, new_tokens: int) -> None:
        prompt = Prompt(17, "", (1,) * prompt_tokens)
        scheduler.submit([Request(prompt, 0, 0, 0, SamplingParams(max_new_tokens=new_tokens))])

    submit(prompt_tokens=40, new_tokens=8)
    with pytest.raises(ValueError, match=r"prompt 17.*49.*48"):
        submit(prompt_tokens=40, new_tokens=9)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False},
        {"use_sliding_window": True, "max_window_layers": 1},  # the layers below this number have none
        {"use_sliding_window": True, "layer_types": ["full_attention"]},
    ],
    ids=["switched off", "of layers beyond the last", "of no layer by name"],
)
def test_a_window_that_no_layer_uses_has_no_effect(folder: Path, kind: str, changes: dict[str, Any]) -> None:
    change_config(folder, model_type=kind, sliding_window=8, head_dim=8, **changes)
    assert decoder_options(read_config(folder)).max_positions == 64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_position_embeddings": 2}, "2 for max_position_embeddings: give a whole number of at least 3"),
        ({"model_type": "mistral", "sliding_window": 1}, "1 for sliding_window: give a whole number of at least 3"),
    ],
)
def test_a_model_without_enough_positions_is_refused(folder: Path, changes: dict[str, Any], said: str) -> None:
    change_config(folder, **changes)
    assert said in refusal(folder)


# -- config.json as published ------------------------------------------------------------------------------------------

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama 3.2 1b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
        | {"original_max_position_embeddings": 8192},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "qwen2.5 0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 16384,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3 0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mistral 7b v0.1": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
}


def published(tmp_path: Path, name: str, **changes: Any) -> DecoderOptions:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | changes))
    return decoder_options(read_config(tmp_path))


def plain_frequencies(theta: float, head_dim: int) -> list[float]:
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def llama3_frequency(frequency: float, factor: float = 32.0, low: float = 1.0, high: float = 4.0) -> float:
    turns = 8192 * frequency / (2 * math.pi)
    share = min(max((turns - low) / (high - low), 0.0), 1.0)
    return (1 - share) * frequency / factor + share * frequency


def test_llama_3_with_scaled_rope(tmp_path: Path) -> None:
    options = published(tmp_path, "llama 3.2 1b")
    assert (options.head_dim, options.num_kv_heads, options.tied) == (64, 8, True)
    assert options.max_positions == 131072
    assert (options.qkv_bias, options.out_bias, options.mlp_bias, options.qk_norm) == (False,) * 4
    want = [llama3_frequency(f) for f in plain_frequencies(500_000.0, 64)]
    torch.testing.assert_close(options.inv_freq, torch.tensor(want), rtol=1e-5, atol=0)


def test_qwen_2_5_with_a_window_that_is_off(tmp_path: Path) -> None:
    options = published(tmp_path, "qwen2.5 0.5b")
    assert (options.head_dim, options.tied, options.max_positions) == (64, True, 32768)
    assert (options.qkv_bias, options.out_bias, options.mlp_bias) == (True, False, False)
    torch.testing.assert_close(options.inv_freq, torch.tensor(plain_frequencies(1e6, 64)), rtol=1e-5, atol=0)


def test_qwen_2_5_with_yarn_as_its_model_card_writes_it(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    options = published(tmp_path, "qwen2.5 0.5b", rope_scaling=scaling)
    assert options.attention_scaling == pytest.approx(0.1 * math.log(4.0) + 1)
    assert float(options.inv_freq[0]) == 1.0
    assert float(options.inv_freq[-1]) == pytest.approx(plain_frequencies(1e6, 64)[-1] / 4)


def test_qwen_3_with_its_own_head_size(tmp_path: Path) -> None:
    options = published(tmp_path, "qwen3 0.6b")
    assert (options.head_dim, options.qk_norm, options.max_positions) == (128, True, 40960)
    assert (options.qkv_bias, options.out_bias) == (False, False)
    torch.testing.assert_close(options.inv_freq, torch.tensor(plain_frequencies(1e6, 128)), rtol=1e-5, atol=0)


def test_the_context_of_mistral_is_limited_to_its_sliding_window(tmp_path: Path) -> None:
    options = published(tmp_path, "mistral 7b v0.1")
    assert (options.head_dim, options.num_kv_heads, options.tied) == (128, 8, False)
    assert options.max_positions == 4096
    assert options.limited_by == "sliding_window"
    assert published(tmp_path, "mistral 7b v0.1", sliding_window=None).max_positions == 32768


@pytest.mark.parametrize("name", ["mistral 7b v0.1", "qwen2.5 0.5b", "qwen3 0.6b"])
def test_config_keys_that_the_family_does_not_have_are_ignored(tmp_path: Path, name: str) -> None:
    """transformers ignores them, so such a checkpoint has no weights for them."""
    stray = {"mlp_bias": True} | ({} if name.startswith("qwen3") else {"attention_bias": True})
    options, plain = published(tmp_path, name, **stray), published(tmp_path, name)
    assert (options.qkv_bias, options.out_bias, options.mlp_bias) == (plain.qkv_bias, plain.out_bias, plain.mlp_bias)


def test_for_the_folder_of_a_run_the_error_names_the_policy_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_00000004" / "policy").mkdir(parents=True)
    (tmp_path / "config.json").write_text('{"model": {"path": "base"}}')
    with pytest.raises(ModelError, match=r"is the folder of a run: give .*step_00000004/policy"):
        read_config(tmp_path)


@pytest.mark.parametrize("pad", [31, 5000, -32])
def test_a_padding_token_beyond_the_vocabulary_is_named(tmp_path: Path, pad: int) -> None:
    Qwen3Config(vocab_size=31, pad_token_id=pad).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"pad_token_id = {pad}, beyond its vocabulary of 31: set it to null"):
        read_config(tmp_path)


def test_a_padding_token_of_llama_1_is_accepted(tmp_path: Path) -> None:
    Qwen3Config(vocab_size=31, pad_token_id=-1).save_pretrained(tmp_path)
    assert read_config(tmp_path).pad_token_id == -1
