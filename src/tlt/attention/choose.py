"""Which backend keeps keys and values of a shape. A new one is chosen here, for the target and for the drafter."""

from __future__ import annotations

from tlt.attention.backend import AttentionBackend, HeadShape
from tlt.attention.slots import SlotAttention


def attention_for(shape: HeadShape) -> AttentionBackend:
    return SlotAttention(shape)
