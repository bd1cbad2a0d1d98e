"""Hugging Face config -> decoder options. A new family is one entry of FAMILIES, if its layer has the same shape."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

ROPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


class ModelError(ValueError):
    """A model folder that cannot be used; the message names the thing and the remedy."""


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
    """the embedding is the head, unless the weights hold another one"""
    max_positions: int
    """positions the weights and the rotary embedding are good for; longer sequences are refused"""
    inv_freq: Tensor
    """[head_dim / 2] float32, rope scaling applied"""
    attention_scaling: float
    """factor on cos and sin (yarn, longrope)"""


def read_config(folder: str | Path) -> PreTrainedConfig:
    """The checked Hugging Face config of a local model folder. Raises ModelError."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: give the folder of a Hugging Face checkpoint")
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path / 'config.json'} is not valid JSON: {error}") from None
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelError(f"{path}: model_type {kind!r} is not known to the rollout decoder; known are {known}")
    if raw.get("auto_map"):
        raise ModelError(
            f"{path}: config.json asks for remote code (auto_map), which tlt never runs: remove that entry"
        )
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers' own checks have many types
        raise ModelError(f"{path / 'config.json'} does not make a model: {_last_line(error)}") from None


def decoder_options(config: PreTrainedConfig) -> DecoderOptions:
    """Options of the decoder for a known family. Raises ModelError for a variant it does not do."""
    c: Any = config
    if c.hidden_act != "silu":
        raise ModelError(f"hidden_act {c.hidden_act!r} is not known to the rollout decoder; known is silu")
    biased = c.model_type in ("llama", "qwen3") and getattr(c, "attention_bias", False)
    rotary = _rotary_embedding(c)
    return DecoderOptions(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        intermediate_size=c.intermediate_size,
        rms_norm_eps=c.rms_norm_eps,
        qk_norm=c.model_type == "qwen3",
        qkv_bias=c.model_type == "qwen2" or biased,
        out_bias=biased,
        mlp_bias=c.model_type == "llama" and getattr(c, "mlp_bias", False),
        tied=c.tie_word_embeddings,
        max_positions=_max_positions(c),
        inv_freq=rotary.inv_freq.detach().to("cpu", torch.float32),
        attention_scaling=float(rotary.attention_scaling),
    )


def _rotary_embedding(config: Any) -> Any:
    """The family's own module from transformers, so that every kind of rope scaling is its own arithmetic."""
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind not in ROPES:
        raise ModelError(f"rope type {kind!r} is not known to the rollout decoder; known are {', '.join(ROPES)}")
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    try:
        return getattr(module, f"{FAMILIES[config.model_type]}RotaryEmbedding")(config)
    except Exception as error:
        raise ModelError(f"config.json asks for a {kind} rope that cannot be built: {_last_line(error)}") from None


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def _max_positions(config: Any) -> int:
    """The longest sequence whose cached keys stay valid: past it these ropes change frequency, and a window cuts the
    context."""
    rope = config.rope_parameters or {}
    limits = [config.max_position_embeddings]
    if rope.get("rope_type") == "longrope":  # "dynamic" keeps its frequencies up to max_position_embeddings
        limits.append(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    if getattr(config, "sliding_window", None):
        limits.append(config.sliding_window)
    return min(limits)
