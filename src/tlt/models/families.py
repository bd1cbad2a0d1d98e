"""Options of decoders, read from a Hugging Face config.

The fused decoder (decoder.py) supports the families in FAMILIES. For other causal language models, the generic decoder
(generic.py) runs transformers' own code, if the model's only state is keys and values.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tlt.files import errors_as
from tlt.models.model_folder import ModelError, raw_config

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
LAYERS = {"full_attention", "sliding_attention"}  # layer types whose only state is keys and values

ROPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class DecoderOptions:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    """whether the embedding also serves as the head, unless the weights have another head"""
    max_positions: int
    """longest sequence in tokens that the weights and the rotary embedding support; longer requests are refused"""
    inv_freq: Tensor
    """[head_dim / 2] inverse frequencies of the rotary embedding in float32, with rope scaling applied"""
    attention_scaling: float
    """factor on cos and sin of the rotary embedding, for the rope types yarn and longrope"""
    limited_by: str = "max_position_embeddings"
    """name of the config.json field that limits `max_positions`"""


def read_config(folder: str | Path) -> PreTrainedConfig:
    """Return the checked Hugging Face config of a local model folder. Raises ModelError."""
    path, raw = Path(folder), raw_config(folder)
    _check_family(path, raw.get("model_type"))
    with errors_as(ModelError, f"{path / 'config.json'} does not describe a valid model"):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    _check_family(path, config.model_type)  # transformers turns a mistral with layer_types into a ministral
    if (text := config.get_text_config()) is not config:
        raise ModelError(
            f"{path}: models of type {config.model_type} have other parts than text, and tlt trains text alone: give a "
            f"model of type {text.model_type}"
        )
    _refuse_padding(path, config)
    return config


def _refuse_padding(path: Path, config: Any) -> None:
    """Raise ModelError for a padding token outside the vocabulary, because transformers would fail an assertion."""
    pad, size = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if pad is not None and isinstance(size, int) and not -size <= pad < size:
        raise ModelError(
            f"{path}: config.json has pad_token_id = {pad}, beyond its vocabulary of {size}: set it to null"
        )


def _check_family(path: Path, kind: Any) -> None:
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{path}: model_type {kind!r} is not a causal language model of the installed transformers: use another "
            "model, or install a version that supports it"
        )


def base_of(rope: Mapping[str, Any]) -> float:
    """Return `rope_theta`, the base of the rotary embedding. Return 1e4 if the config has none, for example because
    each type of layer has its own.

    This base is used for the learned drafter of a target that the fused decoder does not support."""
    return rope.get("rope_theta", 1e4)


def is_fused(config: PreTrainedConfig) -> bool:
    """Return whether the fused decoder supports this model's family."""
    return config.model_type in FAMILIES


def decoder_options(config: PreTrainedConfig) -> DecoderOptions:
    """Return the options of a model's decoder. Raises ModelError for an unsupported variant."""
    remedy = "check the types and sizes of its fields"
    with errors_as(ModelError, "config.json does not describe a valid model", remedy):
        options = _fused_options(config) if is_fused(config) else _generic_options(config)
        _refuse_sizes(options)
    return options


def _refuse_sizes(options: DecoderOptions) -> None:
    """Raise ModelError for sizes that transformers accepts but no decoder can have, such as 0 layers."""
    for name in _SIZES:
        value, least = getattr(options, name), 1
        if name == "max_positions":
            name, least = options.limited_by, _LEAST_POSITIONS
        if not isinstance(value, int) or value < least:
            field = _HUGGING_FACE.get(name, name)
            raise ModelError(f"config.json has {value!r} for {field}: give a whole number of at least {least}")
    if options.num_heads % options.num_kv_heads:
        raise ModelError(
            f"config.json has {options.num_heads} heads, not a multiple of its {options.num_kv_heads} key-value heads"
        )


_LEAST_POSITIONS = 3  # one token of a prompt, and two of a response
_SIZES = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("intermediate_size", "max_positions"),
)
_HUGGING_FACE = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
"""field of `DecoderOptions` -> field of config.json, if the names differ"""


def _fused_options(config: PreTrainedConfig) -> DecoderOptions:
    c: Any = config
    _refuse_unknown(c)
    biased = c.model_type in ("llama", "qwen3") and getattr(c, "attention_bias", False)
    options = _sizes(c, _max_positions(c))
    rotary = _rotary_embedding(c, options.head_dim)
    return replace(
        options,
        qk_norm=c.model_type == "qwen3",
        qkv_bias=c.model_type == "qwen2" or biased,
        out_bias=biased,
        mlp_bias=c.model_type == "llama" and getattr(c, "mlp_bias", False),
        inv_freq=rotary.inv_freq.detach().to("cpu", torch.float32),
        attention_scaling=float(rotary.attention_scaling),
    )


def _generic_options(config: PreTrainedConfig) -> DecoderOptions:
    c: Any = config
    _refuse_untrainable(c)
    if unknown := set(getattr(c, "layer_types", None) or ()) - LAYERS:
        raise ModelError(
            f"config.json has layers of type {min(unknown)!r}, but tlt decodes only models whose only state is keys "
            "and values: use another model"
        )
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(c)]
    if not kind._supports_sdpa:
        raise ModelError(
            f"models of type {c.model_type} cannot be trained with tlt, because transformers computes their attention "
            "without scaled_dot_product_attention: give a model of another type"
        )
    return _sizes(c, _trained_positions(c))


def _sizes(c: Any, limit: tuple[int, str]) -> DecoderOptions:
    """Return the options that are common to all families. `limit` is (`max_positions`, `limited_by`).

    The generic decoder does not read options such as `intermediate_size`. For its models, they only describe the layer
    of the learned drafter. A field that is missing in config.json gets a default."""
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    theta = base_of(getattr(c, "rope_parameters", None) or {})
    return DecoderOptions(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=getattr(c, "num_key_value_heads", c.num_attention_heads),
        head_dim=head_dim,
        intermediate_size=getattr(c, "intermediate_size", 4 * c.hidden_size),
        rms_norm_eps=getattr(c, "rms_norm_eps", 1e-6),
        qk_norm=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        tied=c.tie_word_embeddings,
        max_positions=limit[0],
        limited_by=limit[1],
        inv_freq=theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim),
        attention_scaling=1.0,
    )


def _refuse_unknown(c: Any) -> None:
    """Raise ModelError for options that transformers (and so the policy) supports, but the fused decoder does not."""
    if c.hidden_act != "silu":
        raise ModelError(
            f"config.json has hidden_act = {c.hidden_act!r}, but tlt decodes {c.model_type} models only with silu: use "
            "another model"
        )
    _refuse_untrainable(c)
    window = getattr(c, "sliding_window", None)
    if window is not None and window < 1:
        raise ModelError(f"config.json has sliding_window = {window}: give a number of tokens, or null for no window")
    known = {"full_attention"} | ({"sliding_attention"} if window else set())
    if c.model_type in ("qwen2", "qwen3") and (unknown := set(c.layer_types) - known):
        raise ModelError(
            f"config.json has layers of type {min(unknown)!r} with sliding_window = {window}, but tlt decodes only "
            f"{', '.join(sorted(known))}: change layer_types or sliding_window, or use another model"
        )


def _refuse_untrainable(c: Any) -> None:
    if not getattr(c, "is_causal", True):
        raise ModelError(
            "config.json has is_causal = false, but tlt supports only causal attention: use another model, or remove "
            "is_causal if the model was trained with causal attention"
        )
    if getattr(c, "quantization_config", None) is not None:
        raise ModelError("config.json has a quantization_config, and such weights cannot be trained: dequantize them")
    if getattr(c, "transformers_weights", None):
        raise ModelError(
            "config.json names its weights in transformers_weights, but tlt reads only model.safetensors: rename the "
            "weights to that, and remove the entry"
        )


def _rotary_embedding(config: Any, head_dim: int) -> Any:
    """Return transformers' rotary module for the family, because it implements every kind of rope scaling."""
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind not in ROPES:
        raise ModelError(
            f"config.json has rope type {kind!r}, but tlt supports only {', '.join(ROPES)}: use another model"
        )
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    try:
        rotary = getattr(module, f"{FAMILIES[config.model_type]}RotaryEmbedding")(config)
    except Exception as error:
        raise ModelError(f"config.json asks for a {kind} rope that cannot be built: {_last_line(error)}") from None
    turned = 2 * len(rotary.inv_freq)
    if turned != head_dim:
        raise ModelError(
            f"the rope of config.json rotates {turned} of a head's {head_dim} dimensions, but the rollout decoder "
            "rotates all: remove partial_rotary_factor"
        )
    return rotary


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def _max_positions(config: Any) -> tuple[int, str]:
    """Return the length in tokens up to which cached keys stay valid, and the config field that limits it.

    In longer sequences, some ropes change their frequencies, and a sliding window cuts the context."""
    limits = [_trained_positions(config)]
    typed = config.model_type in ("qwen2", "qwen3")  # other families have the window in every layer
    if getattr(config, "sliding_window", None) and (not typed or "sliding_attention" in config.layer_types):
        limits.append((config.sliding_window, "sliding_window"))
    return min(limits, key=lambda limit: limit[0])


def _trained_positions(config: Any) -> tuple[int, str]:
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [(config.max_position_embeddings, "max_position_embeddings")]
    for one in (rope, *(one for one in rope.values() if isinstance(one, Mapping))):  # some have one per layer type
        original = one.get("original_max_position_embeddings")
        if one.get("rope_type") == "longrope" and original:  # "dynamic" keeps its frequencies up to the first limit
            limits.append((original, "original_max_position_embeddings"))
    return min(limits)
