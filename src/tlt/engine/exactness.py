"""Check at start: whether a row's bits depend on what else is in a pass.

If they do not, no draft, no other row and no worker changes a token or a log-prob. A library may break this, because it
chooses the order of a sum by the shape of its inputs. So the engine decodes one text in three ways and compares bits:
in one pass, in several passes, and in one pass with other rows. Attention and matrix products are also compared alone,
over more tokens than the whole model can decode in the time of a check. So a difference has a name.

Shapes: B rows, N tokens per row, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlt.attention.key_counts import BLOCK, rounded_up
from tlt.attention.slot_memory import HeadShape
from tlt.attention.slots import attention_for
from tlt.engine.protocol import Target
from tlt.models.decoder import Attend, Decoder
from tlt.models.product import Product

ATTENTION, PRODUCTS, OTHER = "attention", "matrix products", "another operation of the model, such as a norm or experts"
_CONTEXT = BLOCK + 88  # tokens before the text, so that attention needs a second block of keys
_OTHERS = (3, 300)  # tokens before the text in the other rows
_OF_MODEL, _OF_PRODUCT, _OF_ATTENTION = (1, 1, 7, 4), (1, 2, 3, 5, 53), (*range(1, 17), 24)
"""numbers of tokens in each pass, if a text is decoded in several passes. The model gets an odd number in all, because
torch cuts activations into a part per thread, and the ends of a part may have other bits."""

Forward = Callable[[Tensor, Tensor, Attend], Tensor]
"""Function (places [B, N] in the text, positions [B, N], attention) -> results [B, N, X]"""


@dataclass(frozen=True)
class Exactness:
    """Result of the check. If `checked` is false, another engine decodes, and nothing is known."""

    checked: bool = False
    operations: tuple[str, ...] = ()
    """operations whose bits depend on what else is in a pass"""

    @classmethod
    def of_all(cls, found: Iterable[Exactness]) -> Exactness:
        """Return the result for several workers."""
        found = list(found)
        return cls(all(one.checked for one in found), tuple(sorted({name for one in found for name in one.operations})))

    @property
    def exact(self) -> bool | None:
        """Whether all bits agree; None if this was not checked."""
        return not self.operations if self.checked else None

    @property
    def meaning(self) -> str:
        """Sentence for users."""
        if not self.checked:
            return "not checked whether drafts and other responses change bits, because vLLM decodes (docs/vllm.md)"
        if not self.operations:
            return "exact: drafts and other responses change no bit of a response's tokens and log-probs"
        return (
            f"not exact: the last bits of {' and '.join(self.operations)} depend on what else is in a pass, so drafts "
            "and other responses may decide between two tokens that are almost equally good; `tlt verify` counts them"
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of summary.json."""
        return {"exact": self.exact, "exactness": self.meaning}


@torch.inference_mode()
def check_exactness(target: Target) -> Exactness:
    """Compare the bits of several ways to decode a text. The target must have weights."""
    if not isinstance(target, Decoder):
        return Exactness()
    options, shape = target.options, HeadShape.of(target.options, target.dtype, target.device)
    passes = [size for i, size in enumerate(_OF_MODEL) if sum(_OF_MODEL[: i + 1]) <= options.max_positions]
    text = torch.linspace(0, options.vocab_size - 1, sum(passes), device=target.device).long()

    def model(places: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = target.forward(text[places], positions, attend)
        return torch.cat([hidden, target.logits(hidden)], dim=-1)

    def agree(products: Iterable[Product]) -> bool:
        return all(_agrees(_only(product, one_layer), one_layer, _OF_PRODUCT) for product in products)

    one_layer, found = replace(shape, num_layers=1), list[str]()
    if not _agrees(_only_attention(one_layer), one_layer, _OF_ATTENTION, _CONTEXT):
        found.append(ATTENTION)
    if not agree({product.shape: product for product in target.products}.values()):
        found.append(PRODUCTS)
    if not found and not _agrees(model, shape, passes, min(_CONTEXT, options.max_positions - sum(passes))):
        found.append(OTHER if agree([*target.products, target.to_logits]) else PRODUCTS)
    return Exactness(True, tuple(found))


def _only_attention(shape: HeadShape) -> Forward:
    """Return a model that is nothing but one attention layer, with random queries, keys and values. The values are
    small, so that rounding errors of the sum over the context show in the result."""
    query = _random(shape, sum(_OF_ATTENTION), shape.num_heads, shape.head_dim)
    key, value = (_random(shape, len(query), shape.num_kv_heads, shape.head_dim) * scale for scale in (1, 2**-10))

    def forward(places: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        at = places.flatten()
        return attend(0, query[at], key[at], value[at]).view(*places.shape, -1)

    return forward


def _only(product: Product, shape: HeadShape) -> Forward:
    """Return a model that is nothing but one matrix product, without and with a residual. The residual is the negative
    product, so that the sum consists of rounding errors."""
    x = _random(shape, sum(_OF_PRODUCT), product.shape[1]).to(product.dtype)
    residual = -product(x)

    def forward(places: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        at = places.flatten()
        return torch.cat([product(x[at]), product(x[at], residual[at])], dim=-1).view(*places.shape, -1)

    return forward


def _random(like: HeadShape, *sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(like.device, like.dtype)


def _pairs(shape: HeadShape, tokens: int) -> Tensor:
    """Return random keys and values [2, K, tokens, E]. Those of the second half are equal keys and opposite values, so
    that sums over all consist of rounding errors."""
    half = _random(shape, 2, shape.num_kv_heads, -(-tokens // 2), shape.head_dim)
    return torch.cat([half, torch.stack([half[0], -half[1]])], dim=2)[:, :, :tokens]


def _agrees(forward: Forward, shape: HeadShape, passes: Sequence[int], context: int = 0) -> bool:
    """Return whether a text, after `context` other tokens, has the same bits if it is decoded in one pass, in these
    passes, and in one pass with other rows."""
    store, tokens = attention_for(shape), sum(passes)
    store.resize(1 + len(_OTHERS), rounded_up(context + tokens, store.key_counts))
    before = _pairs(shape, context).expand(shape.num_layers, -1, -1, -1, -1)

    def decode(rows: Sequence[int], passes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the results [tokens, X] of the middle row, and its keys and values. `rows`: tokens before the text."""
        middle, done, results = len(rows) // 2, 0, list[Tensor]()
        for slot, length in enumerate(rows):
            store.write(slot, before[:, :, :, :length])
        for size in passes:
            lengths = [length + done for length in rows]
            plan = store.plan(0, lengths, size)
            new = torch.arange(size, device=shape.device).expand(len(rows), -1)
            positions = torch.tensor(lengths, device=shape.device)[:, None] + new
            results.append(forward(done + new, positions, partial(store.attend, plan))[middle])
            done += size
        return torch.cat(results), store.read(middle, context + tokens)

    first, last = (min(length, context) for length in _OTHERS)
    one_pass = decode([context], [tokens])
    others = decode([first, context, last], [tokens]), decode([context], passes)
    return all(torch.equal(*pair) for way in others for pair in zip(one_pass, way, strict=True))
