"""Matrix products whose weights change only at a weight sync. The bits of an output depend on its own row alone.

A library chooses the order of a sum by the number of rows. So each weight has one kernel, and a few rows are padded to
a number of rows from which on this kernel has one order. On CPUs, oneDNN packs a float32 weight once, and a bfloat16
weight if the CPU multiplies bfloat16. MKL is used for other weights. It packs the weight again in each product. CPU
time in ms of all products in a pass of SmolLM2-135M without its head, on one thread with AVX-512:

    rows                1    2    4    8   16
    float32 plain      25   37   52   59   76
    float32 packed     30   35   24   32   43
    bfloat16 packed    16   18   14   18   24

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 4  # oneDNN has one order of summation from this number of rows on, MKL for multiples of it


class Product:
    """Function x @ weight.T + bias for a weight [N, K] in Hugging Face's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, shared: bool = False) -> None:
        """Prepare the memory layout. If `shared` is true, `weight` is not copied, so the caller must not change it."""
        self.shape, self.dtype, self.bias = weight.shape, weight.dtype, bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if _can_pack(weight) else None
        self._plain = None
        if self.packed is None:
            self._plain = weight.t() if shared else weight.t().clone(memory_format=torch.contiguous_format)

    @property
    def weight(self) -> Tensor:
        """Weight [N, K]. A packed weight is unpacked at each access."""
        return self.packed.to_dense() if self._plain is None else self._plain.t()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual [M, N], for x [M, K] and residual [M, N]."""
        rows = x.shape[0]  # len(x) takes a microsecond longer, 50 times in a pass
        if self._plain is None:
            if rows < _ROWS:
                x, residual = _repeated(x), None if residual is None else _repeated(residual)
            return self._by_onednn(x, residual)[:rows]
        if x.is_cpu and rows % _ROWS:
            x = F.pad(x, (0, 0, 0, -rows % _ROWS))
            residual = None if residual is None else F.pad(residual, (0, 0, 0, -rows % _ROWS))
        added = [term for term in (residual, self.bias) if term is not None]
        out = torch.addmm(sum(added[1:], added[0]), x, self._plain) if added else torch.mm(x, self._plain)
        return out[:rows]

    def _by_onednn(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")


def _repeated(x: Tensor) -> Tensor:
    """Return the rows of `x`, repeated to at least `_ROWS` rows. This is faster than to add zeros."""
    return torch.cat([x] * -(-_ROWS // max(1, x.shape[0])))


def _can_pack(weight: Tensor) -> bool:
    if not weight.is_cpu or not torch.backends.mkldnn.is_available():
        return False
    fast = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return fast or weight.dtype == torch.float32
