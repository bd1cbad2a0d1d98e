"""Export of the learned drafter to other engines: its tensors, with the tensor names and config.json of each format.

- EAGLE-1 (arXiv 2401.15077): vLLM loads it as LlamaForCausalLM, without a head. SGLang loads it as
  LlamaForCausalLMEagle, whose fc has a bias.
- EAGLE-3 (arXiv 2503.01840): vLLM and SGLang load it as LlamaForCausalLMEagle3, with the target's head. vLLM and
  SGLang number the target's layers differently, so config.json has both numberings.

Engines do not report missing or unknown tensors, so `tests/draft/test_formats.py` checks the exact sets of tensors.
Other engines draft greedily, without the shared noise, so they draft only the drafter's likeliest tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt.draft.drafter_folder import DrafterError
from tlt.draft.eagle import EagleLayer, EagleOptions, checkpoint_tensors
from tlt.models.families import FAMILIES, base_of

Format = Literal["vllm", "sglang"]


def write_drafter(
    layer: EagleLayer, target: Mapping[str, Any], folder: str | Path, to: Format, head: Tensor | None = None
) -> None:
    """Write the drafter's model.safetensors and config.json in the format `to`. `target` is the target's config, as
    transformers 5 has read it. `head` is that of the target, [V, D], which is stored with an EAGLE-3 drafter.
    Without it the engine uses the target's own. Raises DrafterError if engines do not support this drafter."""
    _refuse(layer.options)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(layer, to, head)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")  # SGLang loads the drafter in this dtype
    config = _config(layer.options, target, to) | {"dtype": dtype, "torch_dtype": dtype}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def method(options: EagleOptions) -> str:
    """Return vLLM's name for this kind of drafter."""
    return "eagle3" if options.kind == "eagle3" else "eagle"


def _refuse(options: EagleOptions) -> None:
    if options.kind == "eagle3" and list(options.taps) != sorted(set(options.taps)):
        raise DrafterError(
            f"the drafter reads the target's layers {', '.join(map(str, options.taps))}, but engines need three "
            "different layers in ascending order, which needs a target of seven layers or more: train a drafter with "
            "speculation.kind = 'eagle1'"
        )


def _tensors(layer: EagleLayer, to: Format, head: Tensor | None) -> dict[str, Tensor]:
    found = checkpoint_tensors(layer)
    if layer.options.kind == "eagle1":
        # SGLang would leave a missing bias as it was initialised, at random; vLLM's fc has none
        return found | ({"fc.bias": torch.zeros_like(found["fc.weight"][:, 0])} if to == "sglang" else {})
    if head is not None:
        found["lm_head.weight"] = head.detach().to("cpu", found["fc.weight"].dtype, copy=True)
    return found


def _config(options: EagleOptions, target: Mapping[str, Any], to: Format) -> dict[str, Any]:
    """Return the drafter's config.json for vLLM or SGLang. The rotary embedding is that of the target."""
    eagle1 = "LlamaForCausalLMEagle" if to == "sglang" else "LlamaForCausalLM"
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if options.kind == "eagle3" else eagle1],
        **_llama(options, target),
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": target.get("eos_token_id"),
    }
    if options.kind == "eagle1":
        return config
    nested = [tap - 1 for tap in options.taps]  # SGLang numbers a hidden state by the layer before it
    return config | {
        "draft_vocab_size": options.vocab_size,
        "num_aux_hidden_states": len(options.taps),
        "eagle_aux_hidden_state_layer_ids": list(options.taps),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": nested},
        "norm_before_residual": False,
        **_window(options),
    }


def _llama(options: EagleOptions, target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json entries of a Llama model with one layer. `tie_word_embeddings` is always false, because
    SGLang would otherwise use the embedding as the head."""
    return {
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
        **_rope(target),
    }


def _rope(target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json entries of the drafter's rotary embedding, with the names of transformers 4 and 5. They
    are the target's if the fused decoder supports its family. Otherwise there is no rope scaling, as in
    `families.decoder_options`."""
    rope = target.get("rope_parameters") or {}
    if target["model_type"] not in FAMILIES:
        rope = {"rope_type": "default", "rope_theta": base_of(rope)}
    found = {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        found["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    if rope["rope_type"] == "longrope" and (original := rope.get("original_max_position_embeddings")):
        found["original_max_position_embeddings"] = original
    return found


def _window(options: EagleOptions) -> dict[str, Any]:
    """Return the config.json entries of the attention window, for EAGLE-3 in vLLM. SGLang has none."""
    return {"layer_types": ["sliding_attention"], "sliding_window": options.window}
