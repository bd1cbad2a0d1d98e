"""Protocol of the model that a drafter learns from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tlt.models.families import DecoderOptions


class Teacher(Protocol):
    """Model that a drafter learns to predict. It is the target of tlt's own engine (`Decoder`) or the policy itself
    (`rl/teacher.py`). Its version changes with each update of the policy."""

    @property
    def options(self) -> DecoderOptions: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def version(self) -> int: ...

    @property
    def embedding(self) -> Tensor:
        """[V, D] token embedding of the current version; V: vocabulary size, D: hidden size"""
        ...

    @property
    def head(self) -> Tensor:
        """[V, D] output head of the current version, which the next version may change in place"""
        ...

    def cis(self, positions: Tensor) -> Tensor:
        """Return cos + i sin [M, 1, E/2] of the rotary embedding at positions [M]; E: head size."""
        ...
