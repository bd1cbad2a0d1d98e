"""Factory of the attention backend for the target and the learned drafter. Add a new backend here."""

from __future__ import annotations

import logging
from functools import cache

import torch

from tlt.attention.backend import HeadShape
from tlt.attention.slots import SlotAttention
from tlt.sampling import has_kernel

log = logging.getLogger(__name__)


def attention_for(shape: HeadShape) -> SlotAttention:
    if shape.device.type == "cuda":
        # cuDNN makes a plan for each new shape, which takes 43 ms on an H100, and most passes have a new shape
        torch.backends.cuda.enable_cudnn_sdp(False)
    if not has_kernels(shape):
        return SlotAttention(shape)
    from tlt.attention.kernel_slots import KernelAttention

    return KernelAttention(shape)


@cache
def has_kernels(shape: HeadShape) -> bool:
    """Return whether `kernels.py` runs on the device and computes attention with heads of this shape. Other GPUs, and
    models in float64, get PyTorch's attention."""
    if shape.dtype == torch.float64 or not has_kernel(shape.device):
        return False
    from tlt.attention.kernel_slots import KernelAttention

    slots = KernelAttention(shape)
    slots.resize(1, 16)
    heads = torch.zeros(
        1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=shape.device
    )
    query, key, value = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    try:
        slots.attend(slots.plan(0, [0], 1), 0, query, key, value)
    except Exception as error:
        log.warning("attention runs in PyTorch, because Triton's does not run on %s: %s", shape.device, error)
        return False
    return True
