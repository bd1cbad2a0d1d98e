"""What the target computed for the last tokens of each live row: the learned drafter's input, and the harvest.

Shapes: R rows, C entries of a ring, F features of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_SLACK = 64  # entries beyond the window, so that a whole window can still be read after a round's commit


class FeatureLayout(NamedTuple):
    """Which hidden states are kept: those that enter the layers `taps` (hidden_states[i] of Hugging Face), then the
    last one, after the final norm; and of how many tokens a row."""

    taps: tuple[int, ...]
    window: int

    def width(self, hidden_size: int) -> int:
        return (len(self.taps) + 1) * hidden_size


class FeatureWindow:
    """Entry p of a row is the features of its token p with token p + 1; entries [first, length) are there, of which
    the last `window` are used. Rows follow the engine's order."""

    def __init__(self, layout: FeatureLayout, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.window, self.device = layout, layout.window, device
        self.capacity = layout.window + _SLACK
        self.features = torch.zeros(0, self.capacity, layout.width(hidden_size), dtype=dtype, device=device)
        self.tokens = torch.zeros(0, self.capacity, dtype=torch.long, device=device)
        self.first: list[int] = []
        self.length: list[int] = []
        self._held = 0  # the oldest entry that the first free place still has

    def append(self, inherited: int = 0) -> None:
        """A new last row that holds nothing yet, or so many first entries of the row that left its place."""
        self.first.append(min(self._held, inherited))
        self.length.append(inherited)
        if len(self.first) > len(self.features):
            more = max(8, len(self.features))
            self.features = torch.cat([self.features, self.features.new_zeros(more, *self.features.shape[1:])])
            self.tokens = torch.cat([self.tokens, self.tokens.new_zeros(more, self.capacity)])

    def remove(self, row: int) -> None:
        """The last row takes its place."""
        last = len(self.first) - 1
        if row != last:
            self.copy(last, row, self.length[last], self.first[last])
        self._held = max(self.first.pop(), self.length.pop() - self.capacity)

    def copy(self, source: int, target: int, length: int, first: int = 0) -> None:
        """Entries below `length` of another row, as far back as that row still has them."""
        held = max(self.first[source], self.length[source] - self.capacity)
        self.features[target], self.tokens[target] = self.features[source], self.tokens[source]
        self.first[target], self.length[target] = min(max(first, held), length), length

    def write(
        self, rows: Sequence[int], positions: Sequence[int], features: Tensor, next_tokens: Sequence[int]
    ) -> None:
        """Entries (rows[m], positions[m]), in the order of positions within a row; features [M, F]."""
        where = torch.tensor([rows, [p % self.capacity for p in positions], next_tokens], device=self.device)
        self.features[where[0], where[1]] = features
        self.tokens[where[0], where[1]] = where[2]
        for row, position in zip(rows, positions, strict=True):
            self.length[row] = position + 1

    def start(self, row: int) -> int:
        """The oldest entry in use."""
        return max(self.first[row], self.length[row] - self.window)

    def read(self, row: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Copies of features [high - low, F] and of the tokens that follow each [high - low]."""
        place = torch.arange(low, high, device=self.device) % self.capacity
        return self.features[row, place], self.tokens[row, place]
