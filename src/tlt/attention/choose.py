"""Factory of the attention backend, for the target and the drafter. Add a new backend here."""

from __future__ import annotations

from tlt.attention.backend import HeadShape
from tlt.attention.slots import SlotAttention


def attention_for(shape: HeadShape) -> SlotAttention:
    return SlotAttention(shape)
