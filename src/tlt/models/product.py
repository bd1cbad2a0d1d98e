"""Products with a weight that changes only at a sync, in the layout that this machine multiplies fastest.

MKL re-packs a weight in each product of two or more rows, so that verifying four tokens costs two plain passes. oneDNN
packs it once. On SmolLM2-135M (float32, AVX2, one thread) the products of a pass over 1, 2, 4, 8 and 64 rows take 33,
56, 71, 93 and 281 ms with plain weights, and 39, 41, 50, 67 and 263 ms with packed ones.
Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import Tensor

_ROWS = 4  # of the products that are timed: a short draft
_REPEATS = 20  # the least of them counts, so that other processes matter little
_TIMED_WEIGHTS = 1 << 21  # at most: some of the outputs of a large head are as good as all


class Product:
    """x @ weight.T + bias for a weight [N, K] in the layout of Hugging Face.

    A transposed copy is kept for products of one row even where the weight is packed. Without it a pass over one row
    would take a fifth longer, and plain decoding at batch 1 would be no faster than transformers. The price is a second
    copy of the weights in memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, shared: bool = False) -> None:
        """With `shared`, `weight` is kept as it is, because the caller needs it too and never changes it. Packed
        weights then serve one row as well, for which they are faster than this layout."""
        self.bias, self.shared = bias, shared
        self.weight = weight.t() if shared else weight.t().clone(memory_format=torch.contiguous_format)
        pays = weight.device.type == "cpu" and packing_pays(
            *weight.shape, weight.dtype, shared, torch.get_num_threads()
        )
        self.packed = _pack(weight) if pays else None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [M, K], residual [M, N] -> x @ weight.T + bias + residual [M, N]."""
        if self.packed is None or (len(x) == 1 and not self.shared):
            added = [term for term in (residual, self.bias) if term is not None]
            return torch.addmm(sum(added[1:], added[0]), x, self.weight) if added else torch.mm(x, self.weight)
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")


@cache
def packing_pays(outputs: int, inputs: int, dtype: torch.dtype, shared: bool, threads: int) -> bool:
    """Time a few rows with a plain and a packed weight in turn. oneDNN packs float32, and bfloat16 on some CPUs; small
    weights are faster plain, because a call of oneDNN takes 20 us to begin."""
    if not _can_pack(dtype):
        return False
    weight = torch.ones(min(outputs, max(1, _TIMED_WEIGHTS // inputs)), inputs, dtype=dtype)
    x, plain, packed = weight.new_ones(_ROWS, inputs), weight.t(), _pack(weight)
    if not shared:
        plain = plain.contiguous()
    ways = (
        lambda: torch.mm(x, plain),
        lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
    )
    seconds: list[list[float]] = [[], []]
    for _ in range(_REPEATS):
        for way, took in zip(ways, seconds, strict=True):
            began = time.perf_counter()
            way()
            took.append(time.perf_counter() - began)
    return min(seconds[1]) < min(seconds[0])


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack(weight: Tensor) -> Tensor:
    # oneDNN picks one layout for all batch sizes above 1
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
