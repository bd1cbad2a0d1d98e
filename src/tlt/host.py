"""From the device to the host. Drafting, verification and prefill wait for the device here, so that their waits can be
counted; the harvest makes its own copies."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_NUMPY = {torch.float64: np.float64, torch.int64: np.int64}


def to_host(*tensors: Tensor) -> list[np.ndarray]:
    """All of them in one copy, in their shapes: integers as int64, other numbers as float64 or, on a CPU, as they
    are. Integers must be below 2^53, as they travel as float64."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu().numpy()
    parts = np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [
        part.reshape(tensor.shape).astype(_NUMPY.get(tensor.dtype, np.float64))
        for part, tensor in zip(parts, tensors, strict=True)
    ]
