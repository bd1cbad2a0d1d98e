"""Drafter for CPUs: the target itself with int8 weights. It needs no training, because its weights are the target's.

It attends to the target's own keys and values, so it has no cache of its own. The keys and values of its draft tokens
are written after the committed ones, where the target's next pass overwrites them. (Self-drafting with quantized
weights is from EfficientRollout, arXiv 2606.18967.)

Each output channel of a weight has its own scale. All inputs of a product share one scale, as in PyTorch's dynamic
quantization. Embedding and norms are shared with the target. CPU time in ms of all matrix products in a pass of
SmolLM2-135M, on one thread with AVX-512:

    rows                1    2    4    8   16
    float32 packed     44   62   38   51   71
    bfloat16 packed    20   24   18   24   32
    int8                8    8    9   12   19
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tlt.draft.drafter import Candidates, DraftCache, Level, Sources
from tlt.draft.features import FeatureView
from tlt.models.decoder import Decoder, Layer
from tlt.models.product import Product
from tlt.sampling import sampling_log_probs
from tlt.types import Request

_SHARE = 0.005  # maximum share of the time for quantizing; slightly older weights have almost the same acceptance rate
_PRODUCTS = ("qkv", "out", "gate_up", "down")


def needs_short_inputs() -> bool:
    """Return whether inputs must have 7 bits. Without VNNI or AMX, an x86 CPU adds two products of 8 bits in 16 bits,
    and a sum that does not fit is cut off."""
    found = torch.cpu.get_capabilities()
    whole = any(found.get(name, False) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))
    return found.get("architecture") == "x86_64" and not whole


def can_quantize(target: Decoder) -> bool:
    """Return whether an int8 copy can be made: the target is the fused decoder on a CPU, and PyTorch has int8 products
    for this CPU."""
    has_products = torch.backends.quantized.engine != "none" and hasattr(torch.ops.quantized, "linear_dynamic")
    return type(target) is Decoder and target.device.type == "cpu" and has_products


class Int8Product:
    """Int8 version of a `Product`. The weight is int8. Inputs are quantized at each call, to 8 bits, or to 7 if
    `needs_short_inputs` says so."""

    def __init__(self, product: Product) -> None:
        weight = product.weight.float()  # [N, K]
        scales = weight.abs().amax(1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        if not torch.isfinite(scales).all():
            raise ArithmeticError("a weight is not finite in float32, so it has no int8 copy")
        values, zeros = (weight / scales[:, None]).round_().to(torch.int8).contiguous(), torch.zeros(len(scales)).long()
        # torch.quantize_per_channel takes twice as long
        whole = torch._make_per_channel_quantized_tensor(values, scales.double(), zeros, 0)  # pyright: ignore[reportPrivateImportUsage]
        bias = None if product.bias is None else product.bias.float()
        self.packed, self.short = torch.ops.quantized.linear_prepack(whole, bias), needs_short_inputs()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual [M, N], for x [M, K] and residual [M, N]."""
        out = torch.ops.quantized.linear_dynamic(x.float(), self.packed, self.short).to(x.dtype)
        return out if residual is None else out.add_(residual)


class Int8Copy:
    """Int8 copy of a target, made when it is first used."""

    def __init__(self, target: Decoder) -> None:
        self._copy = target.empty()
        self._seconds = self._ended = 0.0  # duration and end of the last quantization
        self._version = -1  # of the quantized weights

    @classmethod
    def of(cls, target: Decoder) -> Int8Copy:
        """Return the int8 copy of this target. All engines with this target share it."""
        if target not in _COPIES:
            _COPIES[target] = cls(target)
        return _COPIES[target]

    def refresh(self, target: Decoder) -> None:
        """Quantize the target's current weights, if there is a copy of older ones. Do nothing if quantizing would take
        more than 0.5 % of the time since it was last done. If the current weights are not finite, keep the older
        copy."""
        is_old = self._copy.layers and self._version != target.version
        if is_old and time.perf_counter() - self._ended >= self._seconds / _SHARE:
            with suppress(ArithmeticError):
                self._quantize(target)

    def _quantize(self, target: Decoder) -> None:
        began = time.perf_counter()
        with warnings.catch_warnings(), ThreadPoolExecutor(torch.get_num_threads()) as pool:  # packing uses one thread
            warnings.simplefilter("ignore")  # the tensor's dtype is deprecated, but the product needs it
            to_logits: Any = pool.submit(Int8Product, target.to_logits)
            products = list(pool.map(_layer_products, target.layers))
        copy = self._copy
        copy.to_logits = to_logits.result()
        copy.embedding, copy.norm, copy.head = target.embedding, target.norm, target.head
        copy.layers = [replace(layer, **own) for layer, own in zip(target.layers, products, strict=True)]
        self._version = target.version
        self._ended = time.perf_counter()
        self._seconds = self._ended - began

    def decoder(self, target: Decoder) -> Decoder:
        """Return the copy as a decoder. It shares its embedding and norms with the target, so they are the current
        ones."""
        if not self._copy.layers:
            self._quantize(target)
        return self._copy


def _layer_products(layer: Layer) -> dict[str, Int8Product]:
    return {name: Int8Product(getattr(layer, name)) for name in _PRODUCTS}


_COPIES: WeakKeyDictionary[Decoder, Int8Copy] = WeakKeyDictionary()


class QuantizedDrafter:
    """Drafter of chains that runs the int8 copy of the target. The copy is made at the first draft."""

    name = "quantized"
    acceptance_rate: float | None = None

    def __init__(self, target: Decoder) -> None:
        self.target, self.copy = target, Int8Copy.of(target)

    def attach(self, cache: DraftCache) -> None:
        self.cache = cache

    def begin(self, window: FeatureView | None) -> None:
        self.copy.refresh(self.target)

    def open(self, request: Request, committed: Sequence[int]) -> None: ...

    def commit(self, row: int, tokens: Sequence[int]) -> None: ...

    def close(self, row: int, last: int) -> None: ...

    @torch.inference_mode()
    def predict(self, level: Level) -> Candidates:
        decoder = self.copy.decoder(self.target)
        positions, attend = self.cache.draft_pass(level.depth)
        positions = positions.clamp(max=decoder.options.max_positions - 1)  # a draft may exceed the last position
        hidden = decoder.forward(torch.from_numpy(level.tokens)[:, None], positions, attend)[:, 0]
        if not torch.isfinite(hidden[torch.from_numpy(level.alive)].sum()):
            raise ArithmeticError("the int8 copy of the model computed a value that is not finite")
        return Candidates(None, sampling_log_probs(decoder.logits(hidden), level.sampling)[0])


def make(sources: Sources) -> QuantizedDrafter | None:
    return QuantizedDrafter(sources.target) if can_quantize(sources.target) else None
