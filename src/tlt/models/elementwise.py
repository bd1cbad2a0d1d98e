"""Elementwise functions whose bits do not depend on the number of rows or threads.

PyTorch cuts a large tensor into one part per thread. It computes the last elements of a part one by one and not as
vectors, and for some functions, such as SiLU and complex products, they then have other last bits. So a part must end
with a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_GRAIN = 32768  # elements from which on PyTorch uses several threads, at most one for each such number


def by_rows(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), for inputs whose first dimension has the same rows. The first input has the shape of
    the result."""
    rows, size, threads = len(inputs[0]), inputs[0][:1].numel(), torch.get_num_threads()
    if threads == 1 or rows * size < _GRAIN or not inputs[0].is_cpu:
        return function(*inputs)
    whole = rows - rows % threads  # each thread gets the same number of whole rows
    if whole * size < threads * _GRAIN:
        whole = 0
    if whole == rows:
        return function(*inputs)
    few = max(1, (_GRAIN - 1) // size)  # rows for one thread
    counts = [whole, *(min(few, rows - low) for low in range(whole, rows, few))]
    return torch.cat([function(*part) for part in zip(*(x.split(counts) for x in inputs), strict=True)])
