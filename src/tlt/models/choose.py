"""Which decoder a model gets."""

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
    """An empty decoder; `load` gives it weights. Raises ModelError."""
    options = decoder_options(config)
    return Decoder(options, dtype, device) if is_fused(config) else GenericDecoder(options, dtype, device, config)


def folder_weights(folder: str | Path, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Return a folder's tensors by the names that they have in the model of transformers. Raises ModelError.

    Some families have other names in their files, which transformers translates as it loads them."""
    if is_fused(read_config(folder)):
        return read_safetensors(folder)
    return load_model(folder, dtype, torch.device("cpu")).state_dict()
