"""Attention over slots whose target passes run the Triton kernels of `kernels.py`. Drafts run PyTorch's attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt.attention import kernels
from tlt.attention.slots import SlotAttention


class KernelPlan(NamedTuple):
    """Plan of a target pass over slots [first, first + B), with `new` new tokens per row."""

    first: int
    lengths: Tensor
    """[B] committed positions of each row; -1 for padding"""
    new: int
    longest: int
    """bound of the rows' lengths, new tokens included"""


class KernelAttention(SlotAttention):
    """Slots whose target passes have the same bits for each number of rows and of new tokens, by construction."""

    def mask_bytes(self, new: int) -> int:
        return 0  # the kernels compare positions

    def plan(self, first: int, lengths: Sequence[int], new: int) -> Any:
        longest = max(lengths) + new
        assert longest <= self.tokens, "the cache must resize before a pass"
        return KernelPlan(first, torch.tensor(lengths, device=self.shape.device), new, longest)

    def fixed_plan(self, lengths: Tensor, new: int) -> Any:
        return KernelPlan(0, lengths, new, self.tokens)

    def attend(
        self, plan: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None
    ) -> Tensor:
        if not isinstance(plan, KernelPlan):
            return super().attend(plan, layer, query, key, value, window)
        both, (first, lengths, new, longest) = self.layers[layer], plan
        kernels.store(both, first, lengths, new, key, value)
        return kernels.attend(both, first, lengths, new, query, window, longest)
