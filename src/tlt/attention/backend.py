"""Protocol of attention backends. To add a backend (paged attention, another kernel), write one file with these
methods.

Shapes: R slots, B rows in a pass, N new tokens per row, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


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


class AttentionBackend(Protocol):
    """Store of keys and values in R slots, and attention over them. Each slot has one sequence.

    The backend decides where in a slot it stores position p."""

    @property
    def slots(self) -> int:
        """Number of slots R."""
        ...

    @property
    def tokens(self) -> int:
        """Capacity of each slot in tokens."""
        ...

    key_counts: tuple[int, ...]
    """sizes of the last block of keys in a target pass (`key_counts`), to which the capacity of slots is rounded"""

    @property
    def memory(self) -> Sequence[Tensor]:
        """One tensor per layer, which has the keys and values of all slots. `resize` replaces these tensors."""
        ...

    def mask_bytes(self, new: int) -> int:
        """Return the bytes of the masks of a pass with `new` tokens per row, for each token of the slots. On a CPU only
        a part of them exists at a time."""
        ...

    def resize(self, slots: int, tokens: int) -> None:
        """Set the number of slots, and of tokens per slot. Keys and values that fit are kept. New memory is zero."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of the first `length` positions of slot `source` to slot `target`."""
        ...

    def read(self, slot: int, length: int) -> Tensor:
        """Return a copy of the keys and values at the first `length` positions of a slot, in host memory."""
        ...

    def write(self, slot: int, values: Tensor) -> None:
        """Write keys and values that `read` returned, for this or another slot, to the first positions of a slot."""
        ...

    def wipe(self, slot: int, start: int) -> None:
        """Set the keys and values of a slot to zero from position `start` on. A mask is not enough to hide values that
        are not finite, because 0 * NaN is NaN."""
        ...

    def plan(self, first: int, lengths: Sequence[int], new: int) -> Any:
        """Return the plan of a target pass over slots [first, first + B). `attend` needs it.

        Row b has `lengths[b]` committed positions and gets `new` tokens, which follow them. Each attends to itself and
        to everything before it."""
        ...

    def plan_draft(self, lengths: Sequence[int], starts: Sequence[int], written: Entries | None) -> Any:
        """Return the plan of the first pass of a draft, over slots [0, B). `attend` needs it.

        Each row has one query: its last committed entry, `lengths[b] - 1`. It attends to entries [starts[b],
        lengths[b]). `written` lists the entries whose keys and values the pass writes (None: only the last entry of
        each row)."""
        ...

    def deeper(self, plan: Any) -> Any:
        """Return the plan of a draft's next pass, with one more token per row. It attends to itself and to everything
        that the token before it attends to. The plan of the previous pass, `plan`, may not be used any more."""
        ...

    def attend(
        self, plan: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None
    ) -> Tensor:
        """Write the keys and values, [B * N, K, E] each, of a pass in this layer. Return the attention output
        [B * N, H * E] of `query` [B * N, H, E].

        If the plan has `written` entries, key and value are [M, K, E], one for each entry. Scores are scaled by E **
        -0.5. Softmax is computed in float32 or wider. A token attends to the last `window` tokens, itself included
        (None: to all)."""
        ...
