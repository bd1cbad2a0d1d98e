"""Matrix products whose weights change only at a weight sync, in the fastest memory layout on this machine.

MKL packs the weight again in each product of two or more rows, so a pass over four tokens takes almost twice as long as
a pass over one token. oneDNN packs it once. CPU time in ms of all products in a pass of SmolLM2-135M, on one thread
with AVX-512:

    rows                1    2    4    8   16   32   64
    float32 plain      31   45   52   71   85   94  127
    float32 packed     41   40   41   42   59   78  128
    bfloat16 packed    24   23   23   24   21   24   34

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import Tensor

_ROWS = 4  # number of rows in the timed products, as for a short draft
_REPEATS = 5  # number of timings; the shortest counts, so that other processes matter little
_CALL_SECONDS = 20e-6  # overhead of a call of oneDNN between other operations, which the timed products do not have
_TIMED_BYTES, _COPIES = 1 << 25, 16  # size and maximum number of timed weights; no CPU cache holds them, as in a pass
NEVER = 1 << 62  # more rows than any product has


class Product:
    """Function x @ weight.T + bias for a weight [N, K] in Hugging Face's layout.

    Products of at least `packed_from` rows use a weight packed by oneDNN. On most CPUs, a product of one row is faster
    with the unpacked float32 weight, so both are kept.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, shared: bool = False) -> None:
        """Prepare the memory layouts. If `shared` is true, `weight` is not copied, so the caller must not change it."""
        self.bias = bias
        cpu = weight.device.type == "cpu"
        key = (*weight.shape, weight.dtype, shared, torch.get_num_threads())
        self.packed_from = packed_from(*key) if cpu else NEVER
        self.packed = _pack(weight) if self.packed_from < NEVER else None
        self.weight = weight.t() if shared else weight.t().clone(memory_format=torch.contiguous_format)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual [M, N], for x [M, K] and residual [M, N]."""
        if x.shape[0] < self.packed_from:  # len(x) takes a microsecond longer, 50 times in a pass
            added = [term for term in (residual, self.bias) if term is not None]
            return torch.addmm(sum(added[1:], added[0]), x, self.weight) if added else torch.mm(x, self.weight)
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")


@cache
def packed_from(outputs: int, inputs: int, dtype: torch.dtype, shared: bool, threads: int) -> int:
    """Return the smallest number of rows for which a packed weight is faster than an unpacked one: 1, 2 or NEVER.
    Products of 4 rows are timed, then products of 1 row. If packing is faster for 4 rows only, the result is 2.

    oneDNN packs float32, and bfloat16 on some CPUs. Small weights are faster unpacked, because a call of oneDNN in a
    pass has an overhead of about 20 us."""
    if not _can_pack(dtype):
        return NEVER
    outputs = min(outputs, max(1, _TIMED_BYTES // (inputs * dtype.itemsize)))  # part of a large head is enough
    copies = min(_COPIES, -(-_TIMED_BYTES // (outputs * inputs * dtype.itemsize)))
    weights = [torch.ones(outputs, inputs, dtype=dtype) for _ in range(copies)]
    plain = [weight.t() if shared else weight.t().contiguous() for weight in weights]
    packed = [_pack(weight) for weight in weights]
    if not _packed_is_faster(weights[0].new_ones(_ROWS, inputs), plain, packed):
        return NEVER
    return 1 if _packed_is_faster(weights[0].new_ones(1, inputs), plain, packed) else 2


def _packed_is_faster(x: Tensor, plain: list[Tensor], packed: list[Tensor]) -> bool:
    seconds: list[list[float]] = [[], []]
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for weight in plain:
            torch.mm(x, weight)
        between = time.perf_counter()
        for weight in packed:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        seconds[0].append(between - began)
        seconds[1].append(time.perf_counter() - between + _CALL_SECONDS * len(packed))
    return min(seconds[1]) < min(seconds[0])


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack(weight: Tensor) -> Tensor:
    # oneDNN picks one layout for all batch sizes above 1
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
