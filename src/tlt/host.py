"""Copies between the host and the device. Drafting, verification and prefill wait for the device only in `to_host`, so
that these waits can be counted. The hidden states saved for drafter training are copied elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_NUMPY = {torch.float64: np.float64, torch.int64: np.int64}


def to_device(device: torch.device, *columns: np.ndarray) -> Sequence[Tensor]:
    """Copy int64 arrays [M] to the device in one transfer. On a CUDA device the host does not wait for it."""
    flat = torch.from_numpy(np.concatenate(columns))
    if device.type == "cuda":
        flat = flat.pin_memory()
    return flat.to(device, non_blocking=True).split([len(column) for column in columns])


def to_host(*tensors: Tensor) -> list[np.ndarray]:
    """Copy tensors to the host in one transfer, and return them as NumPy arrays of the same shapes. On a GPU, int64
    stays int64 and all other dtypes become float64. On a CPU the dtypes are kept. Integers must be below 2^53, because
    they are transferred as float64."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu().numpy()
    parts = np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [
        part.reshape(tensor.shape).astype(_NUMPY.get(tensor.dtype, np.float64))
        for part, tensor in zip(parts, tensors, strict=True)
    ]
