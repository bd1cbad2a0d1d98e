"""Debug check of the key-value cache: a record of the inputs from which each position was computed.

The keys and values of a token depend on the target's weights and on all tokens up to it. So each position has a
checksum of the target version, and of all tokens and positions up to its own. Checksums are copied and moved with the
keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt.attention.backend import TreeBatch

_PRIME, _VERSION = 0x1E3779B97F4A7C15, 0x12B2AE3D27D4EB4F  # odd hash factors; sums and products wrap modulo 2^64


class Ledger:
    """Checksums of all positions of all slots of the key-value cache."""

    def __init__(self) -> None:
        self.booked = torch.zeros(0, 0, dtype=torch.int64)  # [slots, tokens] checksums, 0: empty

    def resized(self, slots: int, tokens: int) -> None:
        old, self.booked = self.booked, torch.zeros(slots, tokens, dtype=torch.int64)
        r, t = min(slots, len(old)), min(tokens, old.shape[1])
        self.booked[:r, :t] = old[:r, :t]

    def wrote(self, first: int, lengths: Sequence[int], trees: TreeBatch, version: int) -> None:
        """Record the nodes of a pass. A node's checksum is that of the last committed position before the root, plus
        hashes of all nodes that the node attends to."""
        B, N = trees.tokens.shape
        committed, row = torch.tensor(lengths), torch.arange(first, first + B)
        before = torch.where(committed > 0, self.booked[row, (committed - 1).clamp(min=0)], _begin(version))
        own = _mixed(trees.tokens.cpu(), committed[:, None] + trees.depths.cpu())
        visible = torch.ones(N, N, dtype=torch.bool).tril() if trees.visible is None else trees.visible.cpu()
        sums = before[:, None] + (visible * own[:, None, :]).sum(-1)
        self.booked[row[:, None], committed[:, None] + torch.arange(N)] = sums

    def copied(self, source: int, target: int, length: int) -> None:
        self.booked[target, :length] = self.booked[source, :length]

    def moved(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
        slots, sources, targets = slots.cpu(), sources.cpu(), targets.cpu()
        self.booked[slots, targets] = self.booked[slots, sources]

    def wiped(self, slot: int, start: int) -> None:
        self.booked[slot, start:] = 0

    def check(self, contexts: Sequence[Sequence[int]], version: int) -> None:
        """Raise AssertionError unless each slot s begins with the keys and values of the tokens `contexts[s]`."""
        for slot, context in enumerate(contexts):
            tokens = torch.tensor(context, dtype=torch.int64)
            want = _begin(version) + _mixed(tokens, torch.arange(len(tokens))).cumsum(0)
            wrong = (self.booked[slot, : len(tokens)] != want).nonzero()
            assert not len(wrong), f"slot {slot} has wrong keys and values from position {int(wrong[0])} on"


def _begin(version: int) -> Tensor:
    """Return the checksum of no tokens, for this target version."""
    return torch.tensor(version) * _VERSION


def _mixed(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return a hash of each token and its position. Sums of these hashes wrap modulo 2^64."""
    x = (tokens * 1_000_003 + positions + 1) * _PRIME
    return (x ^ (x >> 29)) * _PRIME
