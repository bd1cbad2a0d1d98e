"""Elementwise functions whose bits do not depend on the number of rows or threads.

PyTorch cuts a large tensor into one part per thread. It computes the last elements of a part one by one and not as
vectors, and for some functions, such as SiLU and complex products, they then have other last bits. So a part must end
with a row, and a row with a vector.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW = 16384  # elements up to which every function uses one thread; most use one up to 32768, but not GELU
_MANY = 32768  # elements per thread from which on every function uses all threads
_VECTORS = 64  # elements that PyTorch computes at a time: two vectors of at most 32


def by_rows(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), for inputs whose first dimension has the same rows. The first input has the shape of
    the result. Rows of a multiple of 32 elements are exact: PyTorch computes two vectors at a time."""
    rows, size, threads = len(inputs[0]), inputs[0][:1].numel(), torch.get_num_threads()
    if threads == 1 or rows * size <= _FEW or not inputs[0].is_cpu:
        return function(*inputs)
    whole = rows - rows % threads  # each thread gets the same number of whole rows
    if whole * size < threads * _MANY:
        whole = 0
    if whole == rows:
        return function(*inputs)
    first = [function(*(x[:whole] for x in inputs))] if whole else []
    parts = zip(*(x[whole:].split(max(1, _FEW // size)) for x in inputs), strict=True)
    return torch.cat([*first, *(_on_one_thread(function, *part) for part in parts)])


def by_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x), for rows of any size. If it is not a multiple of whole vectors, all elements are computed as
    one padded sequence."""
    if x.shape[-1] % _VECTORS == 0:
        return by_rows(function, x.reshape(-1, x.shape[-1])).view(x.shape)
    padded = F.pad(x.reshape(-1), (0, -x.numel() % _VECTORS)).view(-1, _VECTORS)
    return by_rows(function, padded).view(-1)[: x.numel()].view(x.shape)


def _on_one_thread(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), for a few rows or one long row."""
    if inputs[0].numel() <= _FEW:
        return function(*inputs)
    return torch.cat([function(*part) for part in zip(*(x.split(_FEW, dim=-1) for x in inputs), strict=True)], dim=-1)
