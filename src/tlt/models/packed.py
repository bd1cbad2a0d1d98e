"""Operations inside transformers' own models, replaced by ones whose bits depend on their own row alone.

Linear layers and experts get a `Product`. Routers, gates and some feed-forward layers call PyTorch's functions
themselves, so these calls are intercepted.

Shapes: M tokens, D hidden size, E experts, k experts per token, F feed-forward size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from tlt.models.product import Product, by_vectors

EXPERTS = "tlt_engine"
"""name of the experts' implementation in transformers' registry"""
_ACTIVATIONS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})
_BY_VECTORS = frozenset({torch.sigmoid, Tensor.sigmoid, F.silu, F.gelu, F.softplus})
"""functions that PyTorch computes with other last bits by vectors than one by one"""
_INTERCEPTED = frozenset({"linear", *(function.__name__ for function in _BY_VECTORS)})


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.product = Product(linear.weight.t() if isinstance(linear, Conv1D) else linear.weight, linear.bias)

    @property
    def weight(self) -> Tensor:
        """Weight [outputs, inputs]. Expert routers of some families read it instead of calling the layer."""
        return self.product.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class PackedExperts:
    """Products of a layer's experts. They replace its parameters [E, 2 F, D] and [E, D, F], or transposed ones."""

    def __init__(self, experts: Any) -> None:
        self.up, self.down = (
            [Product(weight.t() if experts.is_transposed else weight) for weight in weights]
            for weights in (experts.gate_up_proj, experts.down_proj)
        )
        del experts.gate_up_proj, experts.down_proj

    def __call__(self, experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [M, D] over each token's experts, for `hidden` [M, D], and for `chosen` and `weights`
        [M, k]. A token's experts are summed in the order of `chosen`."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.up)).tolist()
        parts = hidden[order // chosen.shape[1]].split(counts)
        found = [
            down(experts._apply_gate(up(x))) for x, up, down in zip(parts, self.up, self.down, strict=True) if len(x)
        ]
        each = torch.empty(len(order), hidden.shape[1], dtype=hidden.dtype).index_copy_(0, order, torch.cat(found))
        each = each.view(*chosen.shape, -1) * weights[..., None]
        return each.sum(dim=1).to(hidden.dtype)


def experts_forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the output of a layer's experts, for transformers' registry of experts."""
    return experts.packed(experts, hidden, chosen, weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


class _OwnRowAlone(TorchFunctionMode):
    """Mode in which linear functions are a `Product`, and elementwise functions are computed by vectors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, *weight_and_bias = args
            product = Product(*weight_and_bias, **kwargs or {}, shared=True)
            return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        if func in _BY_VECTORS:
            return by_vectors(lambda x: func(x, *args[1:], **kwargs or {}), args[0])
        return func(*args, **kwargs or {})


def _intercepted(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def call(*args: Any, **settings: Any) -> Any:
        with _OwnRowAlone():
            return forward(*args, **settings)

    return call


def _calls_intercepted(module: nn.Module) -> bool:
    """Return whether a method of a module's class calls a function that must be intercepted. The whole model does not
    count, because to intercept all its calls would take a fifth of its time."""
    kinds = [] if isinstance(module, PreTrainedModel) else type(module).__mro__
    codes = (getattr(inspect.unwrap(f), "__code__", None) for kind in kinds for f in vars(kind).values() if callable(f))
    return any(_INTERCEPTED & {*code.co_names} for code in codes if code is not None)


def pack(model: nn.Module) -> None:
    """Replace a model's linear layers and experts by `Product`, compute its activation functions by vectors, and
    intercept the functions that other layers call."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear or type(child) is Conv1D:
                setattr(module, name, PackedLinear(child))
        if hasattr(module, "has_gate"):
            _pack_experts(module)
        if isinstance(module, _ACTIVATIONS):
            module.forward = partial(by_vectors, module.forward)
        elif _calls_intercepted(module):
            module.forward = _intercepted(module.forward)


def _pack_experts(experts: Any) -> None:
    """Pack a layer's experts. Experts with biases, norms or no gate keep transformers' own loop."""
    if not next(experts.parameters()).is_cpu:
        return
    if experts.has_gate and not (experts.has_bias or experts.has_post_expert_norm):
        experts.packed = PackedExperts(experts)
    else:
        experts.config._experts_implementation = "eager"


def products_in(model: nn.Module) -> list[Product]:
    """Return all products of a packed model."""
    found = list[Product]()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            found.append(module.product)
        elif isinstance(experts := getattr(module, "packed", None), PackedExperts):
            found += [*experts.up, *experts.down]
    return found
