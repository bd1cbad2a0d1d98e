"""Attention over cached keys and values, and the layout they lie in: one contiguous slot a row.

Keys are kept transposed, so that scores are one batched matmul without a copy. Position p of a sequence lies at index
p of its slot. A pass appends its N new nodes behind the committed ones; which of them a node may see is the tree's
business (`TreeMask`).
Shapes: R slots, B rows of this pass, N new nodes a row, T tokens, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tlt.models.families import DecoderOptions


class PassLayout(NamedTuple):
    """Where the new nodes of slots [first, first + B) go, and what they see; built once a pass, used by every layer."""

    first: int
    row: Tensor  # [B, 1] slot of each row
    place: Tensor  # [B, N] index in the slot
    bias: Tensor  # [B, K or 1, H/K * N or 1, T] 0 where visible, -inf elsewhere


class SlotStore:
    """Keys and values of R slots of T tokens, per layer."""

    def __init__(self, options: DecoderOptions, dtype: torch.dtype, device: torch.device) -> None:
        self.num_kv_heads, self.head_dim = options.num_kv_heads, options.head_dim
        self.queries_per_kv = options.num_heads // options.num_kv_heads
        self.scale = options.head_dim**-0.5
        self.dtype, self.device = dtype, device
        self.keys = [self._empty(0, 0)[0] for _ in range(options.num_layers)]
        self.values = [self._empty(0, 0)[1] for _ in range(options.num_layers)]

    def _empty(self, slots: int, tokens: int) -> tuple[Tensor, Tensor]:
        # zeros: a masked index has weight 0, and 0 * NaN of uninitialised memory would be NaN
        shape = (slots, self.num_kv_heads, self.head_dim, tokens)
        keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return keys, torch.zeros(shape[0], shape[1], tokens, shape[2], dtype=self.dtype, device=self.device)

    @property
    def slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[3]

    def resize(self, slots: int, tokens: int) -> None:
        """Re-allocate layer by layer (so that the peak is one layer above the sum), keeping what fits."""
        r, t = min(slots, self.slots), min(tokens, self.tokens)
        for index in range(len(self.keys)):
            keys, values = self._empty(slots, tokens)
            keys[:r, :, :, :t] = self.keys[index][:r, :, :, :t]
            values[:r, :, :t] = self.values[index][:r, :, :t]
            self.keys[index], self.values[index] = keys, values

    def copy_slot(self, source: int, target: int, length: int) -> None:
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def move(self, row: Tensor, source: Tensor, target: Tensor) -> None:
        """Token `source[i]` of slot `row[i]` goes to `target[i]`; all are read before any is written."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[row, :, :, target] = keys[row, :, :, source]
            values[row, :, target] = values[row, :, source]

    def layout(self, first: int, lengths: Tensor, visible: Tensor | None, new: int) -> PassLayout:
        """`lengths` [B] committed tokens of slots first..; `visible` [B, N, N]: node n sees new node m (None: a
        single node).

        Every node sees all committed tokens of its own slot.
        """
        B, device = len(lengths), self.device
        T = int(lengths.max()) + new
        assert self.tokens >= T, "the cache makes room before a pass"
        beyond = torch.arange(T, device=device) - lengths[:, None]  # [B, T], >= 0 from the first new node on
        if visible is None:
            seen = (beyond <= 0).view(B, 1, 1, T)
        else:
            among_new = visible.gather(2, beyond.clamp(0, new - 1)[:, None].expand(B, new, T)) & (beyond < new)[:, None]
            seen = ((beyond < 0)[:, None] | among_new).repeat(1, self.queries_per_kv, 1)[:, None]
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=device).masked_fill_(~seen, -torch.inf)
        row = torch.arange(first, first + B, device=device)[:, None]
        return PassLayout(first, row, lengths[:, None] + torch.arange(new, device=device), bias)

    def attend(self, layout: PassLayout, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write key, value [B, N, K, E]; attend query [B, N, H, E] -> [B, N, H * E]. Softmax in float32 or wider."""
        B, N = query.shape[:2]
        keys, values = self.keys[layer], self.values[layer]
        keys[layout.row, :, :, layout.place] = key
        values[layout.row, :, layout.place] = value
        rows, T = slice(layout.first, layout.first + B), layout.bias.shape[-1]
        # the queries that share a key-value head become the rows of one matmul: keys are never repeated
        folded = query.view(B, N, self.num_kv_heads, self.queries_per_kv, self.head_dim).permute(0, 2, 3, 1, 4)
        folded = (folded * self.scale).reshape(B, self.num_kv_heads, self.queries_per_kv * N, self.head_dim)
        scores = torch.matmul(folded, keys[rows, :, :, :T]) + layout.bias
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32 if self.dtype == torch.bfloat16 else None)
        mixed = torch.matmul(weights.to(self.dtype), values[rows, :, :T])
        return (
            mixed.view(B, self.num_kv_heads, self.queries_per_kv, N, self.head_dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(B, N, -1)
        )
