"""Matrix products inside transformers' own models, replaced by ones whose bits depend on their own row alone.

Linear layers and experts get a `Product`. Routers of experts multiply by a parameter of their own, so their rows are
padded.

Shapes: M tokens, D hidden size, E experts, k experts per token, F feed-forward size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2CLS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tlt.models.elementwise import by_rows
from tlt.models.product import Product

EXPERTS = "tlt_engine"
"""name of the experts' implementation in transformers' registry"""
_ACTIVATIONS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})
_ROWS = 16  # MKL sums in one order for multiples of this number of rows, with several threads too


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.product = Product(linear.weight, linear.bias)

    @property
    def weight(self) -> Tensor:
        """Weight [outputs, inputs]. Expert routers of some families read it instead of calling the layer."""
        return self.product.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class PackedExperts:
    """Products of a layer's experts. They replace its parameters [E, 2 F, D] and [E, D, F]."""

    def __init__(self, experts: Any) -> None:
        self.up = [Product(weight) for weight in experts.gate_up_proj]
        self.down = [Product(weight) for weight in experts.down_proj]
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


class _PaddedProducts(TorchFunctionMode):
    """Mode in which linear functions get a multiple of `_ROWS` rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **kwargs or {})
        x, *rest = args
        rows = x.reshape(-1, x.shape[-1])
        padded = F.pad(rows, (0, 0, 0, -len(rows) % _ROWS))
        return func(padded, *rest, **kwargs or {})[: len(rows)].view(*x.shape[:-1], -1)


def _padded(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def call(*args: Any, **settings: Any) -> Any:
        with _PaddedProducts():
            return forward(*args, **settings)

    return call


def _by_tokens(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return by_rows(activation, x.flatten(0, -2)).view(x.shape)


def pack(model: nn.Module) -> None:
    """Replace a model's linear layers and experts by `Product`, pad the rows of its routers, and cut the inputs of its
    activation functions by rows."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
        weight = module._parameters.get("weight")
        if hasattr(module, "has_gate"):
            _pack_experts(module)
        elif isinstance(module, _ACTIVATIONS):
            module.forward = partial(_by_tokens, module.forward)
        elif weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            module.forward = _padded(module.forward)


def _pack_experts(experts: Any) -> None:
    """Pack a layer's experts. Experts with biases, norms, another layout or no gate keep transformers' own loop."""
    if not next(experts.parameters()).is_cpu:
        return
    if experts.has_gate and not (experts.has_bias or experts.is_transposed or experts.has_post_expert_norm):
        experts.packed = PackedExperts(experts)
    else:
        experts.config._experts_implementation = "eager"
        experts.forward = _padded(experts.forward)


def products_in(model: nn.Module) -> list[Product]:
    """Return all products of a packed model."""
    found = list[Product]()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            found.append(module.product)
        elif isinstance(experts := getattr(module, "packed", None), PackedExperts):
            found += [*experts.up, *experts.down]
    return found
