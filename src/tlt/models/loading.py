"""Factories of the target's decoder, with or without weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tlt.config import ModelConfig
from tlt.models.decoder import Decoder
from tlt.models.device import torch_device, torch_dtype
from tlt.models.families import decoder_options, is_fused, read_config
from tlt.models.generic import GenericDecoder
from tlt.models.hugging_face import load_model
from tlt.models.weights import read_safetensors
from tlt.progress import working


def decoder_for(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return the decoder for a Hugging Face config, without weights: the fused decoder if it supports the model's
    family, else the generic one. Raises ModelError."""
    options = decoder_options(config)
    return Decoder(options, dtype, device) if is_fused(config) else GenericDecoder(options, dtype, device, config)


def folder_weights(folder: str | Path, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Return the weights in a model folder by the names that they have in transformers' model. Raises ModelError.

    If the fused decoder does not support the family, transformers loads the model, because the names in its files may
    differ."""
    if is_fused(read_config(folder)):
        return read_safetensors(folder)
    return load_model(folder, dtype, torch.device("cpu")).state_dict()


def make_target(config: ModelConfig) -> Decoder:
    """Return a decoder for the model folder that the recipe names, without weights. Raises ModelError."""
    target = decoder_for(read_config(config.path), torch_dtype(config), torch_device(config))
    target.cuda_graphs &= config.cuda_graphs
    return target


def load_target(config: ModelConfig, folder: str | Path) -> Decoder:
    """Return a decoder for the model that the recipe names, with the weights in `folder`. Raises ModelError."""
    target = make_target(config)
    with working(f"load {folder}"):
        target.load(folder_weights(folder, target.dtype), version=0)
    return target
