"""The attention protocol. A new backend (pages, another kernel) is one file with these methods.

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
    """The new tokens of a pass: a tree for each of B rows, padded to N nodes. A node stands `depths` positions behind
    the committed tokens of its row. `visible` [B, N, N] says that node n sees node m, its ancestor or itself (None for
    chains, where a node sees those before it and itself)."""

    tokens: Tensor
    """[B, N]"""
    depths: Tensor
    """[B, N]"""
    visible: Tensor | None


@dataclass(frozen=True)
class HeadShape:
    """What the keys and values of a model look like."""

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
    """Keys and values that a pass writes, in the order in which it gets them: rows [M] of the pass and positions [M],
    int64 on the host."""

    rows: np.ndarray
    positions: np.ndarray


class AttentionBackend(Protocol):
    """Keys and values of R slots, and attention over them. One slot is one sequence; position p of it may lie wherever
    the backend likes."""

    @property
    def slots(self) -> int:
        """R"""
        ...

    @property
    def tokens(self) -> int:
        """Positions that every slot can hold at once."""
        ...

    def resize(self, slots: int, tokens: int) -> None:
        """Have so many slots of so many tokens; what fits in both sizes is kept, the rest reads as zeros."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Slot `target` holds the first `length` positions of slot `source`."""
        ...

    def read(self, slot: int, length: int) -> Tensor:
        """A copy in host memory of the first `length` positions of a slot, for `write`."""
        ...

    def write(self, slot: int, values: Tensor) -> None:
        """A slot begins with what `read` gave, of this or another slot."""
        ...

    def move(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Position `sources[i]` of slot `slots[i]` goes to `targets[i]`; all are read before any is written."""
        ...

    def wipe(self, slot: int, start: int) -> None:
        """Positions from `start` on read as zeros: what is not finite must not stay behind a mask, as 0 * NaN is
        NaN."""
        ...

    def plan(
        self, first: int, lengths: Sequence[int], new: int, visible: Tensor | None, depths: Tensor | None = None
    ) -> Any:
        """A pass of the target, for `attend`, over slots first .. first + B: each row adds `new` nodes behind its
        `lengths` committed positions, `depths` [B, N] positions behind them (None: one after the other). A node sees
        all of these, and of the nodes those that `visible` [B, N, N] says (None: those before it and itself)."""
        ...

    def plan_draft(self, lengths: Sequence[int], starts: Sequence[int], written: Entries | None) -> Any:
        """The first pass of a draft, over slots 0 .. B: the last of each row's `lengths` committed entries attends to
        those from `starts` on. `written` lists the keys and values that the pass writes (None: of that last entry
        alone)."""
        ...

    def deeper(self, plan: Any, new: int, parents: Tensor | None = None) -> Any:
        """The next level of a draft: `new` nodes of each row behind those of `plan`, which may no longer be used. A
        node sees itself and what its parent sees, `parents` [B, new] among the nodes of `plan` (None: of one node a
        row, the only one)."""
        ...

    def attend(
        self, plan: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None
    ) -> Tensor:
        """Write key and value [B * N, K, E] (or those of `written`); attend query [B * N, H, E] scaled by E ** -0.5
        -> [B * N, H * E]. Softmax in float32 or wider. A `window` limits a node to so many tokens, itself included."""
        ...
