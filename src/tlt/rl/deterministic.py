"""Gradients whose bits do not depend on the order in which a GPU's threads end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms, where the default ones add in any order: the gradient of attention.

    Raises RuntimeError in an operation that has none."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch asks for it
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # it finds bugs, and costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
