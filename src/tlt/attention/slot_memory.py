"""Keys and values of all layers, in contiguous slots of equal capacity.

Shapes: R slots, T tokens per slot, K key-value heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.attention.key_counts import key_counts

_SPARE = 16  # extra entries after the last slot, to which padding is written; 16, so that values are aligned


@dataclass(frozen=True)
class HeadShape:
    """Number and size of a model's attention heads, and dtype and device of its keys and values."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, options: Any, dtype: torch.dtype, device: torch.device) -> HeadShape:
        """Return the head shape of a model. `options` are its `DecoderOptions`, a type that this package does not
        import."""
        o = options
        return cls(o.num_layers, o.num_heads, o.num_kv_heads, o.head_dim, dtype, device)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class Entries(NamedTuple):
    """Cache entries whose keys and values a pass writes, in this order. Entry m is position `positions[m]` of row
    `rows[m]` of the pass. Both arrays are int64 [M] in host memory."""

    rows: np.ndarray
    positions: np.ndarray


class SlotMemory:
    """Keys and values in R slots of T tokens. Each slot has one sequence. A layer's keys and values are
    [2, R, K, T, E] in `layers`, a view of its `memory` [2, R * K * T + spare, E]. Padding is written to the spare
    entries."""

    def __init__(self, shape: HeadShape) -> None:
        self.shape = shape
        self.key_counts = key_counts(shape.head_dim, shape.dtype, shape.device.type)
        """sizes of the last block of keys in a target pass, to which the capacity of slots is rounded"""
        self.memory = [self._empty(0, 0) for _ in range(shape.num_layers)]
        self.layers = [self._slots_of(memory, 0, 0) for memory in self.memory]

    def _empty(self, slots: int, tokens: int) -> Tensor:
        s = self.shape
        # zeros: a masked index has weight 0, and 0 * NaN of uninitialised memory would be NaN
        return torch.zeros(2, slots * s.num_kv_heads * tokens + _SPARE, s.head_dim, dtype=s.dtype, device=s.device)

    def _slots_of(self, memory: Tensor, slots: int, tokens: int) -> Tensor:
        """Return a layer's memory as a view [2, R, K, T, E], without the spare entries."""
        return memory[:, : memory.shape[1] - _SPARE].view(
            2, slots, self.shape.num_kv_heads, tokens, self.shape.head_dim
        )

    @property
    def slots(self) -> int:
        """Number of slots R."""
        return self.layers[0].shape[1]

    @property
    def tokens(self) -> int:
        """Capacity T of each slot in tokens."""
        return self.layers[0].shape[3]

    def resize(self, slots: int, tokens: int) -> None:
        """Set the number of slots, and of tokens per slot. Keys and values that fit are kept. New memory is zero. Only
        one layer exists twice at a time."""
        r, t = min(slots, self.slots), min(tokens, self.tokens)
        for layer, old in enumerate(self.layers):
            self.memory[layer] = self._empty(slots, tokens)
            self.layers[layer] = self._slots_of(self.memory[layer], slots, tokens)
            self.layers[layer][:, :r, :, :t] = old[:, :r, :, :t]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of the first `length` positions of slot `source` to slot `target`."""
        for tensor in self.layers:
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def read(self, slot: int, length: int) -> Tensor:
        """Return a copy of the keys and values at the first `length` positions of a slot, in host memory."""
        return torch.stack([tensor[:, slot, :, :length] for tensor in self.layers]).cpu()

    def write(self, slot: int, values: Tensor) -> None:
        """Write keys and values that `read` returned, for this or another slot, to the first positions of a slot."""
        for tensor, part in zip(self.layers, values, strict=True):
            tensor[:, slot, :, : part.shape[2]] = part

    def wipe(self, slot: int, start: int) -> None:
        """Set the keys and values of a slot to zero from position `start` on. A mask is not enough to hide values that
        are not finite, because 0 * NaN is NaN."""
        for tensor in self.layers:
            tensor[:, slot, :, start:] = 0

    # -- indices -------------------------------------------------------------------------------------------------------

    # Indices are computed in NumPy, because the lengths are known on the host, and starting an operation of torch takes
    # longer than all of its work here.

    def _heads(self, first: int, rows: int) -> np.ndarray:
        """Return the flat index in a layer's memory at which each head of each slot begins, [rows, 1, K]."""
        heads = self.shape.num_kv_heads
        return (np.arange(first * heads, (first + rows) * heads) * self.tokens).reshape(rows, 1, heads)

    def _indices(self, committed: np.ndarray, old: int, new: int) -> np.ndarray:
        """Return the indices [B, N] of new tokens in their slots, after `committed` [B] positions and `old` tokens."""
        return (committed[:, None] + np.arange(old, old + new)) % self.tokens

    def _both(self, places: np.ndarray) -> Tensor:
        """Return the flat memory indices `places` of keys, followed by the indices of their values."""
        return self._tensor(np.add.outer((0, self.memory[0].shape[1]), places.ravel()).ravel())

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.shape.device)

    def _places(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the flat memory indices [2 * M * K] of M cache entries: first of their keys, then of their values.
        Padding goes to the last spare entry."""
        heads, values = torch.arange(self.shape.num_kv_heads, device=rows.device), self.memory[0].shape[1]
        first = (rows[:, None] * len(heads) + heads) * self.tokens
        keys = (first + (positions % self.tokens)[:, None]).masked_fill(rows[:, None] < 0, values - 1).flatten()
        return torch.cat([keys, keys + values])
