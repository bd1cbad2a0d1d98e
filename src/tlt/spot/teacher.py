"""Model that a drafter learns from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tlt.models.families import DecoderOptions


class Teacher(Protocol):
    """A model at a version, which changes with the policy: the target of tlt's own engine (`Decoder`), or the policy
    itself (`rl/teacher.py`)."""

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
        """[V, D] embedding of the current version."""
        ...

    @property
    def head(self) -> Tensor:
        """[V, D] head of the current version. The returned tensor does not change with the model."""
        ...

    def cis(self, positions: Tensor) -> Tensor:
        """Return cos + i sin [M, 1, E/2] of the rotary embedding at positions [M]."""
        ...
