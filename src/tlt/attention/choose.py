"""Factory of the attention backend for the target and the learned drafter. Add a new backend here."""

from __future__ import annotations

import torch

from tlt.attention.backend import HeadShape
from tlt.attention.slots import SlotAttention


def attention_for(shape: HeadShape) -> SlotAttention:
    if shape.device.type == "cuda":
        # cuDNN makes a plan for each new shape, which takes 43 ms on an H100, and most passes have a new shape
        torch.backends.cuda.enable_cudnn_sdp(False)
    return SlotAttention(shape)
