"""Matrix products and elementwise functions. The bits of an output depend on its own row alone, not on the number of
rows or threads.

The weights of products change only at a weight sync. A library chooses the order of a sum by the number of rows. So
each weight has one kernel, and a few rows are padded to a number of rows from which on this kernel has one order. On
CPUs, oneDNN packs a float32 weight once, and a bfloat16 weight if the CPU multiplies bfloat16. MKL is used for other
weights. It packs the weight again in each product, and its outputs are padded too. CPU time in ms of all products in a
pass of SmolLM2-135M without its head, on one thread with AVX-512:

    rows                1    2    4    8   16
    float32 plain      25   37   52   59   76
    float32 packed     30   35   24   32   43
    bfloat16 packed    16   18   14   18   24

PyTorch cuts a large tensor for an elementwise function into one part per thread. It computes the last elements of a
part one by one and not as vectors, and for some functions, such as SiLU and complex products, they then have other last
bits. So a part must end with a row, and a row with a vector.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 4  # oneDNN has one order of summation from this number of rows on, MKL for multiples of it
_OUTPUTS = 8  # MKL has one order of summation for all numbers of rows, if the outputs are a multiple of this number
_FEW = 16384  # elements up to which every function uses one thread; most use one up to 32768, but not GELU
_MANY = 32768  # elements per thread from which on every function uses all threads
_VECTORS = 64  # elements that PyTorch computes at a time: two vectors of at most 32


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


# -- elementwise functions ---------------------------------------------------------------------------------------------


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
