"""Attention protocol. A new backend (paged, another kernel) is one file with these methods.

Shapes: R slots, B rows of a pass, N new nodes a row, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class TreeBatch(NamedTuple):
    """New tokens of a pass: a tree for each of B rows, padded to N nodes.

    A node's position is the number of committed tokens of its row plus its depth. `visible` [B, N, N] says whether node
    n attends to node m, which is itself or an ancestor. None means chains: a node attends to itself and all before it.
    """

    tokens: Tensor
    """[B, N]"""
    depths: Tensor
    """[B, N]"""
    visible: Tensor | None
    nodes: Tensor | None = None
    """[M] indices of the nodes that are not padding, b * N + n; None if all are computed"""


@dataclass(frozen=True)
class HeadShape:
    """Shape, dtype and device of a model's keys and values."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, options: Any, dtype: torch.dtype, device: torch.device) -> HeadShape:
        """Return the shape of a model with these `DecoderOptions`, which this package does not import."""
        o = options
        return cls(o.num_layers, o.num_heads, o.num_kv_heads, o.head_dim, dtype, device)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class Entries(NamedTuple):
    """Keys and values that a pass writes, in this order: rows [M] of the pass and positions [M], int64 on the host."""

    rows: np.ndarray
    positions: np.ndarray


class AttentionBackend(Protocol):
    """Keys and values of R slots, and attention over them. One slot has one sequence.

    The backend chooses where position p of a slot is stored."""

    @property
    def slots(self) -> int:
        """Number of slots R."""
        ...

    @property
    def tokens(self) -> int:
        """Number of positions that each slot can hold at once."""
        ...

    @property
    def memory(self) -> Sequence[Tensor]:
        """Tensor of each layer that holds its keys and values. `resize` replaces these tensors."""
        ...

    def resize(self, slots: int, tokens: int) -> None:
        """Set the number of slots, and of tokens per slot. Data that fits both sizes is kept; the rest is zeros."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        ...

    def read(self, slot: int, length: int) -> Tensor:
        """Return a copy of the first `length` positions of a slot in host memory, for `write`."""
        ...

    def write(self, slot: int, values: Tensor) -> None:
        """Write values that `read` returned, for this or another slot, to the first positions of a slot."""
        ...

    def move(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Move position `sources[i]` of slot `slots[i]` to `targets[i]`. All are read before any is written."""
        ...

    def wipe(self, slot: int, start: int) -> None:
        """Zero the positions from `start` on. A mask does not hide a value that is not finite, because 0 * NaN is
        NaN."""
        ...

    def plan(
        self, first: int, lengths: Sequence[int], new: int, visible: Tensor | None, depths: Tensor | None = None
    ) -> Any:
        """Return the plan, for `attend`, of a pass of the target over slots [first, first + B).

        Each row adds `new` nodes to its `lengths` committed positions. A node's position is the committed length plus
        its depth in `depths` [B, N] (None: 0, 1, 2, ...). A node attends to all committed positions, and to the nodes
        in `visible` [B, N, N] (None: itself and all before it)."""
        ...

    def plan_draft(self, lengths: Sequence[int], starts: Sequence[int], written: Entries | None) -> Any:
        """Return the plan of the first pass of a draft, over slots [0, B).

        The last of each row's `lengths` committed entries attends to those from `starts` on. `written` lists the keys
        and values that the pass writes (None: only those of the last entry)."""
        ...

    def deeper(self, plan: Any, new: int, parents: Tensor | None = None) -> Any:
        """Return the plan of a draft's next level: `new` nodes per row after those of `plan`.

        `plan` may not be used any more. A node attends to itself and to all that its parent attends to. `parents` [B,
        new] are indices of nodes in `plan` (None: it has one node per row)."""
        ...

    def attend(
        self, plan: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None
    ) -> Tensor:
        """Write key and value [B * N, K, E] (or [M, K, E] for the `written` entries of the plan), and return attention
        [B * N, H * E] of query [B * N, H, E].

        Scores are scaled by E ** -0.5. Softmax is in float32 or wider. A node attends to the last `window` tokens,
        itself included (None: all)."""
        ...
