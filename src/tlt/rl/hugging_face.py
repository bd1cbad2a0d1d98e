"""The Hugging Face model that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from tlt.files import telling
from tlt.models.families import ModelError


def load_model(folder: str | Path, dtype: torch.dtype, device: torch.device) -> Any:
    with telling(ModelError, f"{folder} cannot be loaded as a model to train"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, attn_implementation="sdpa", use_safetensors=True
        )
    model.to(device)
    model.eval()  # no dropout: old and new log-probs must come from the same function
    return model


def checkpoint_layers(model: Any) -> None:
    newer = getattr(model, "activation_checkpointing_enable", None)  # the other name warns that it is going
    enable = newer or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # transformers checkpoints in training alone; the parts within stay without dropout
