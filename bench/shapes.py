"""Models with random weights: the shapes that the GPU scripts measure, so that they need no checkpoint.

Speed, launches and memory do not depend on the weights' values. Random weights say nothing about acceptance rates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tlt.config import RolloutConfig, TrainConfig
from tlt.models.decoder import Decoder
from tlt.models.loading import decoder_for
from tlt.rl.policy import Policy


def _sizes(hidden: int, wide: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        **{"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers, "vocab_size": vocab},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 32_768},
    }


def _qwen3(hidden: int, wide: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    sizes = _sizes(hidden, wide, layers, heads, 8, 151_936)
    return {"model_type": "qwen3", **sizes, "head_dim": 128, "tie_word_embeddings": tied}


SHAPES: dict[str, dict[str, Any]] = {
    "135m": {"model_type": "llama", **_sizes(576, 1536, 30, 9, 3, 49_152), "tie_word_embeddings": True},
    "1.5b": {"model_type": "qwen2", **_sizes(1536, 8960, 28, 12, 2, 151_936), "tie_word_embeddings": True},
    "3b": {"model_type": "qwen2", **_sizes(2048, 11_008, 36, 16, 2, 151_936), "tie_word_embeddings": True},
    "7b": {"model_type": "qwen2", **_sizes(3584, 18_944, 28, 28, 4, 152_064), "tie_word_embeddings": False},
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "gemma3-1b": {
        **{"model_type": "gemma3_text", **_sizes(1152, 6912, 26, 4, 1, 262_144)},
        **{"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512},
    },
    "tiny": {"model_type": "llama", **_sizes(32, 48, 2, 4, 2, 96), "tie_word_embeddings": True},
    "tiny-gemma3": {
        **{"model_type": "gemma3_text", **_sizes(32, 48, 2, 4, 1, 96)},
        **{"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 80},
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Name of a shape -> fields of its config.json. 135m is SmolLM2-135M, 1.5b, 3b and 7b are Qwen2.5, and the tiny ones
are for tests."""


def shape_config(shape: str, **changes: Any) -> PreTrainedConfig:
    no_tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    fields: dict[str, Any] = SHAPES[shape] | no_tokens | changes
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def random_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """Return transformers' model with random weights, made on `device`. The weights are the same in every process."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def weights_read(config: Any) -> int:
    """Return the number of weights that a pass reads: all but an embedding that is not the head too."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    apart = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    return sum(parameter.numel() for parameter in model.parameters()) - apart


def random_target(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return the engine's decoder with random weights."""
    target = decoder_for(config, dtype, device)
    target.load(random_model(config, dtype, device).state_dict(), 0)
    return target


class RandomPolicy(Policy):
    """Policy with random weights."""

    def __init__(self, shape: str, dtype: torch.dtype, device: torch.device, config: TrainConfig) -> None:
        super().__init__(shape, dtype, device, config, RolloutConfig())

    def _load(self, folder: str | Path, dtype: torch.dtype) -> Any:
        return random_model(shape_config(str(folder)), dtype, self.device)
