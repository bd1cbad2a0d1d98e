"""The key-value cache's accounts: how many slots of how many tokens there are, under a bound in bytes.

Slots [0, live) belong to the live rows, in their order; a slot's committed tokens are [0, length), what lies behind
is free. All slots have one capacity, which grows with the longest row; when the bound does not allow that, the
scheduler preempts.
"""

from __future__ import annotations

import torch

from tlt.engine.attention import SlotStore
from tlt.models.families import DecoderOptions

_GRAIN = 64  # capacity grows in steps of this many tokens


class KVCache:
    def __init__(self, options: DecoderOptions, dtype: torch.dtype, device: torch.device, memory_mb: int) -> None:
        self.store = SlotStore(options, dtype, device)
        per_token = 2 * options.num_layers * options.num_kv_heads * options.head_dim * dtype.itemsize
        self.bound_tokens = memory_mb * 2**20 // per_token
        self.max_tokens = options.max_positions

    def fits(self, slots: int, tokens: int) -> bool:
        """Whether `slots` rows, the longest of `tokens`, stay within the bound."""
        return slots * tokens <= self.bound_tokens

    def reserve(self, slots: int, tokens: int) -> None:
        """Make room for `slots` rows of `tokens`; the caller has asked `fits`. Grows ahead where the bound allows."""
        assert self.fits(slots, tokens), "the scheduler asks fits() first"
        have = self.store.tokens
        if slots <= self.store.slots and tokens <= have:
            return
        # slots that a tail left empty are given up: to make them longer too would take longer than its rounds
        want = have if tokens <= have else -(-(tokens + tokens // 2) // _GRAIN) * _GRAIN
        self.store.resize(slots, min(want, self.bound_tokens // slots))

    def release(self) -> None:
        """Give the memory back (between a rollout and an update on the same device)."""
        self.store.resize(0, 0)
