"""The harvest: what the rollout computed anyway, kept for the drafter's training under a bound."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from torch import Tensor


class Harvest(NamedTuple):
    """Consecutive entries of one response; n at most the window."""

    target_version: int
    start: int
    """position of the first entry"""
    prompt_length: int
    tokens: Tensor
    """[n] the token that follows each entry"""
    features: Tensor
    """[n, F] as laid out by `FeatureLayout`; the last hidden state is after the final norm"""

    @property
    def drafted(self) -> int:
        """Entries that predict a token of the response: the others teach nothing that is drafted."""
        return max(0, self.start + len(self.tokens) - max(self.start, self.prompt_length - 2) - 1)


class HarvestBuffer:
    """The newest harvests of up to `max_tokens` entries; the oldest leave first."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.tokens = max_tokens, 0
        self.items: deque[Harvest] = deque()

    def add(self, harvest: Harvest) -> None:
        if harvest.drafted == 0:
            return
        self.items.append(harvest)
        self.tokens += len(harvest.tokens)
        while self.tokens > self.max_tokens and len(self.items) > 1:
            self.tokens -= len(self.items.popleft().tokens)
