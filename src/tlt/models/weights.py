"""Weights by their Hugging Face names: reading of safetensors files, and sha256 digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlt.models.model_folder import ModelError, weight_paths


def read_safetensors(folder: str | Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint folder by name. Shards are read only if there is no model.safetensors, as in
    transformers.

    Pickle files are never read. Raises ModelError."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with _opened(file) as shard:
            tensors |= {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118 - safe_open is no mapping
    return tensors


def weight_files(folder: str | Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder. Raises ModelError if one is missing or its header is
    damaged."""
    files = weight_paths(folder)
    for file in files:
        with _opened(file):
            pass
    return files


def num_weights(folder: str | Path) -> int:
    """Return the number of weights in a checkpoint folder, read from the headers of its files. Raises ModelError."""
    total = 0
    for file in weight_files(folder):
        with _opened(file) as shard:
            total += sum(math.prod(shard.get_slice(key).get_shape()) for key in shard.keys())  # noqa: SIM118
    return total


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{file} cannot be read ({error}): if it is damaged, fetch or save it again") from None


_OF_A_MODEL = {".safetensors", ".json", ".jinja", ".txt", ".model"}


def folder_sha256(folder: str | Path) -> str:
    """Return the sha256 of a model folder, from names and contents of its weights, configs and tokenizer files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(folder).iterdir() if path.suffix in _OF_A_MODEL and path.is_file()):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def sha256(state: Mapping[str, Tensor]) -> str:
    """Return the sha256 of weights, from their names, dtypes, shapes and little-endian bytes. If several names share
    one tensor, only the first name in alphabetical order counts."""
    digest = hashlib.sha256()
    seen: dict[tuple[Any, ...], Tensor] = {}  # kept alive, because freed memory may be reused
    for name in sorted(state):
        tensor = state[name].detach()
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place in seen:
            continue
        seen[place] = tensor
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
