"""Weights by name, under the names Hugging Face gives them: safetensors files in, a policy's state dict in, one
digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlt.models.families import ModelError


def read_safetensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, single file or sharded. Raises ModelError; pickle files are never read."""
    path = Path(folder)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in names:
        file = path / name
        if file.resolve().parent != path.resolve() or not file.is_file():
            raise ModelError(
                f"{path} has no weights file {name}: tlt reads safetensors only (save the model with save_pretrained)"
            )
        try:
            with safe_open(file, framework="pt") as shard:
                for key in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                    tensors[key] = shard.get_tensor(key)
        except SafetensorError as error:
            raise ModelError(f"{file} is damaged ({error}): fetch or save it again") from None
    return tensors


def sha256(state: Mapping[str, Tensor]) -> str:
    """Digest over name, dtype, shape and little-endian bytes, sorted by name; tensors that share memory count once."""
    digest = hashlib.sha256()
    seen: set[tuple[int, torch.Size]] = set()
    for name in sorted(state):
        tensor = state[name].detach()
        place = (tensor.data_ptr(), tensor.shape)
        if place in seen:
            continue
        seen.add(place)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
