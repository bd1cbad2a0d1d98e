"""Drafters that try to break losslessness. `tlt verify` runs all of them and checks that no token changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tlt.draft.drafter import Offer, Prefix, PrefixDrafter


class RandomDrafter(PrefixDrafter):
    """Drafter that proposes random tokens."""

    name = "random"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.generator = vocab_size, torch.Generator().manual_seed(0)

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        shape = (len(prefixes), 8)
        ids = torch.randint(self.vocab_size, shape, generator=self.generator)
        return Offer(ids, torch.randn(shape, generator=self.generator))


class AdversarialDrafter(PrefixDrafter):
    """Drafter that proposes in turn duplicates, tokens outside the vocabulary, NaN scores, infinite scores, and one
    token with almost all probability."""

    name = "adversarial"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.calls = vocab_size, 0

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        self.calls += 1
        some = (self.calls * 7919) % self.vocab_size
        ids, log_q = [
            ([some, some, some], [50.0, 50.0, 50.0]),
            ([self.vocab_size, -7, some], [9.0, 9.0, 0.0]),
            ([some, (some + 1) % self.vocab_size, 0], [math.nan, 0.0, 0.0]),
            ([some, 0, 1], [math.inf, -math.inf, 0.0]),
            ([some, (some + 1) % self.vocab_size, 2], [90.0, 80.0, -90.0]),
        ][self.calls % 5]
        return Offer(torch.tensor([ids] * len(prefixes)), torch.tensor([log_q] * len(prefixes)))
