"""Our learned drafter as a folder that vLLM serves: the same tensors by the same names, and a config.json of its own.

vLLM drafts greedily, without the noise, so its first guess is right as often as the target's sample is the drafter's
likeliest token. Formats: EAGLE-1 (arXiv 2401.15077) as LlamaForCausalLM, EAGLE-3 (arXiv 2503.01840) as
LlamaForCausalLMEagle3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tlt.draft.eagle import EagleLayer, EagleOptions, save_drafter


def export_drafter(layer: EagleLayer, model_folder: str | Path, folder: str | Path) -> str:
    """Write it; returns the method by which vLLM knows its kind."""
    save_drafter(layer, folder)
    target = json.loads((Path(model_folder) / "config.json").read_text(encoding="utf-8"))
    config = drafter_config(layer.options, target)
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return "eagle3" if layer.options.kind == "eagle3" else "eagle"


def drafter_config(options: EagleOptions, target: dict[str, Any]) -> dict[str, Any]:
    """config.json as vLLM reads it; positions are turned as in the target."""
    rope = {name: target[name] for name in ("rope_theta", "rope_scaling", "rope_parameters") if name in target}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if options.kind == "eagle3" else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "head_dim": options.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": options.rms_norm_eps,
        "vocab_size": options.vocab_size,
        "max_position_embeddings": options.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **rope,
    }
    if options.kind == "eagle3":
        config |= {
            "draft_vocab_size": options.vocab_size,
            "num_aux_hidden_states": len(options.taps),
            "eagle_aux_hidden_state_layer_ids": list(options.taps),
            "norm_before_residual": False,
        }
    return config
