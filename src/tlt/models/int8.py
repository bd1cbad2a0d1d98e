"""An int8 copy of the target: on a CPU its passes over a few rows take about a third of the time, so it can draft.

Each output of a weight has a scale of its own, and the inputs of a product share one, by PyTorch's dynamic
quantization. Embedding and norms are the target's own. CPU time in ms of all products in a pass of SmolLM2-135M, on
one thread with AVX-512:

    rows                1    2    4    8   16
    float32 packed     44   62   38   51   71
    bfloat16 packed    20   24   18   24   32
    int8                8    8    9   12   19
"""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tlt.models.decoder import Decoder, Layer
from tlt.models.product import Product

_SHARE = 0.005  # share of the time that quantizing may take. Weights of some updates before accept hardly fewer tokens
_PRODUCTS = ("qkv", "out", "gate_up", "down")


def can_quantize(target: Decoder) -> bool:
    """Return whether the target is the fused decoder on a CPU for which PyTorch has int8 products."""
    has_products = torch.backends.quantized.engine != "none" and hasattr(torch.ops.quantized, "linear_dynamic")
    return type(target) is Decoder and target.device.type == "cpu" and has_products


class Int8Product:
    """The product of a `Product`, with an int8 weight and inputs quantized to 8 bits."""

    def __init__(self, product: Product) -> None:
        weight = product.weight.t().float()  # [N, K]
        scales = weight.abs().amax(1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        if not torch.isfinite(scales).all():
            raise ArithmeticError("a weight is not finite in float32, so it has no int8 copy")
        values, zeros = (weight / scales[:, None]).round_().to(torch.int8).contiguous(), torch.zeros(len(scales)).long()
        # torch.quantize_per_channel takes twice as long
        whole = torch._make_per_channel_quantized_tensor(values, scales.double(), zeros, 0)  # pyright: ignore[reportPrivateImportUsage]
        bias = None if product.bias is None else product.bias.float()
        self.packed = torch.ops.quantized.linear_prepack(whole, bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual [M, N], for x [M, K] and residual [M, N]."""
        out = torch.ops.quantized.linear_dynamic(x.float(), self.packed).to(x.dtype)
        return out if residual is None else out.add_(residual)


class Int8Copy:
    """The int8 copy of a target, made at its first use."""

    def __init__(self, target: Decoder) -> None:
        self._copy = target.empty()
        self._seconds = self._ended = 0.0  # duration and end of the last quantization
        self._version = -1  # of the quantized weights

    @classmethod
    def of(cls, target: Decoder) -> Int8Copy:
        """Return the one copy of this target, which all engines with it share."""
        if target not in _COPIES:
            _COPIES[target] = cls(target)
        return _COPIES[target]

    def refresh(self, target: Decoder) -> None:
        """Quantize the target's present weights if there is a copy of older ones, unless that would take more than
        0.5 % of the time. If they are not finite, the older copy is kept."""
        is_old = self._copy.layers and self._version != target.version
        if is_old and time.perf_counter() - self._ended >= self._seconds / _SHARE:
            with suppress(ArithmeticError):
                self._quantize(target)

    def _quantize(self, target: Decoder) -> None:
        began = time.perf_counter()
        with warnings.catch_warnings(), ThreadPoolExecutor(torch.get_num_threads()) as pool:  # packing is not threaded
            warnings.simplefilter("ignore")  # the tensor's dtype is deprecated, but the product wants it
            to_logits: Any = pool.submit(Int8Product, target.to_logits)
            products = list(pool.map(_layer_products, target.layers))
        self._copy.to_logits = to_logits.result()
        self._take(target, products)
        self._version = target.version
        self._ended = time.perf_counter()
        self._seconds = self._ended - began

    def decoder(self, target: Decoder) -> Decoder:
        """Return the copy. Its embedding and norms are those of the target now, so that no old ones are kept alive."""
        if not self._copy.layers:
            self._quantize(target)
        elif self._copy.embedding is not target.embedding:
            self._take(target, [{name: getattr(layer, name) for name in _PRODUCTS} for layer in self._copy.layers])
        return self._copy

    def _take(self, target: Decoder, products: list[dict[str, Any]]) -> None:
        copy = self._copy
        copy.embedding, copy.norm, copy.head = target.embedding, target.norm, target.head
        copy.layers = [replace(layer, **own) for layer, own in zip(target.layers, products, strict=True)]


def _layer_products(layer: Layer) -> dict[str, Int8Product]:
    return {name: Int8Product(getattr(layer, name)) for name in _PRODUCTS}


_COPIES: WeakKeyDictionary[Decoder, Int8Copy] = WeakKeyDictionary()
