"""Matrix products whose weights change only at a weight sync. The bits of an output depend on its own row alone.

A library chooses the order of a sum by the number of rows. So each weight has one kernel, and a few rows are padded to
a number of rows from which on this kernel has one order. On CPUs, oneDNN packs a float32 weight once, and a bfloat16
weight if the CPU multiplies bfloat16. MKL is used for other weights. It packs the weight again in each product, and its
outputs are padded too. CPU time in ms of all products in a pass of SmolLM2-135M without its head, on one thread with
AVX-512:

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
_OUTPUTS = 8  # MKL has one order of summation for all numbers of rows, if the outputs are a multiple of this number


class Product:
    """Function x @ weight.T + bias for a weight [N, K] in Hugging Face's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, shared: bool = False) -> None:
        """Prepare the memory layout. If `shared` is true, `weight` may not be copied, so the caller must not change it.
        On CPUs it is copied, because MKL has several orders of summation for a transposed weight."""
        self.shape, self.dtype, self.bias = weight.shape, weight.dtype, bias
        self.packed = _can_pack(weight)
        if self.packed:
            self._stored = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        else:
            if more := -len(weight) % _OUTPUTS if weight.is_cpu else 0:
                weight, bias = F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))
            self._bias = bias
            self._stored = weight.t()
            if weight.is_cpu or not shared:
                self._stored = self._stored.clone(memory_format=torch.contiguous_format)

    @property
    def weight(self) -> Tensor:
        """Weight [N, K]. A packed weight is unpacked at each access."""
        return self._stored.to_dense() if self.packed else self._stored.t()[: self.shape[0]]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual [M, N], for x [M, K] and residual [M, N]."""
        rows = x.shape[0]  # len(x) takes a microsecond longer, 50 times in a pass
        if self.packed:
            if 0 < rows < _ROWS:
                return self._by_onednn(_repeated(x), None if residual is None else _repeated(residual))[:rows]
            return self._by_onednn(x, residual)
        columns, more = (-self.shape[0] % _OUTPUTS, -rows % _ROWS) if x.is_cpu else (0, 0)
        if not columns and not more:
            return self._by_torch(x, residual)
        x, residual = F.pad(x, (0, 0, 0, more)), None if residual is None else F.pad(residual, (0, columns, 0, more))
        return self._by_torch(x, residual)[:rows, : self.shape[0]]

    def _by_onednn(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._stored, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._stored, self.bias, "add")

    def _by_torch(self, x: Tensor, residual: Tensor | None) -> Tensor:
        added = [term for term in (residual, self._bias) if term is not None]
        return torch.addmm(sum(added[1:], added[0]), x, self._stored) if added else torch.mm(x, self._stored)


def _repeated(x: Tensor) -> Tensor:
    """Return the rows of `x`, repeated to at least `_ROWS` rows. This is faster than to add zeros."""
    return torch.cat([x] * -(-_ROWS // x.shape[0]))


def _can_pack(weight: Tensor) -> bool:
    if not weight.is_cpu or not torch.backends.mkldnn.is_available():
        return False
    fast = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return fast or weight.dtype == torch.float32
