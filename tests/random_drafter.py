"""Drafter that proposes random tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tlt.draft.drafter import Offer, Prefix, PrefixDrafter


class RandomDrafter(PrefixDrafter):
    name = "random"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.generator = vocab_size, torch.Generator().manual_seed(0)

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        shape = (len(prefixes), 8)
        ids = torch.randint(self.vocab_size, shape, generator=self.generator)
        return Offer(ids, torch.randn(shape, generator=self.generator))
