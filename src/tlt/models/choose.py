"""Factory of a model's decoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options, is_fused, read_config
from tlt.models.generic import GenericDecoder
from tlt.models.hugging_face import load_model
from tlt.models.weights import read_safetensors


def decoder_for(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return a decoder without weights; `load` sets them. Raises ModelError."""
    options = decoder_options(config)
    return Decoder(options, dtype, device) if is_fused(config) else GenericDecoder(options, dtype, device, config)


def folder_weights(folder: str | Path, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Return a folder's tensors by their names in transformers' model. Raises ModelError.

    The files of some families have other names, which transformers translates during loading."""
    if is_fused(read_config(folder)):
        return read_safetensors(folder)
    return load_model(folder, dtype, torch.device("cpu")).state_dict()
