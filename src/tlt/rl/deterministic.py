"""Context manager for deterministic gradients on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tlt.config import ConfigError
from tlt.files import first_line


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms inside the context, if `enabled`.

    Without these algorithms, CUDA sums the gradient of attention in an order that varies. Raises ConfigError if an
    operation has no deterministic algorithm."""
    settings: Any = torch.utils.deterministic
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = settings.fill_uninitialized_memory
    if enabled:
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # filling memory takes time and only helps to find bugs
    try:
        yield
    except RuntimeError as error:
        if not enabled or "deterministic implementation" not in str(error):
            raise
        raise ConfigError(
            f"a gradient cannot be added up in a fixed order on CUDA ({first_line(error)}): set train.deterministic = "
            "false; two runs may then differ in rounding"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fills
