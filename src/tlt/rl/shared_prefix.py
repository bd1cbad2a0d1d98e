"""Attention for rows of several sequences: a row holds each prompt once, followed by all responses to it.

Each response attends to its prompt and to itself, within the sliding window or chunk of the layer. Its positions
continue those of the prompt. `attend` is registered with transformers, so it serves every model whose attention layers
use that registry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

log = logging.getLogger(__name__)

_NAME = "tlt_shared_prefix"
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_AT_ONCE = 4096  # largest row in tokens whose attention is one call on CUDA; the masked half costs more than calls save
_ROUNDING = 1e-4  # largest difference of hidden states by rounding, relative to the largest hidden state

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function (query [B, H, N, D], key and value [B, K, T, D]) -> attention [B, N, H, D] of the last N of T tokens"""


class CannotShare(RuntimeError):
    """Error for a model whose attention needs something that `attend` does not support."""


@dataclass
class SharedRow:
    """Layout of a row that concatenates groups: prompts, each followed by its responses. A group is given as (number of
    prompt tokens, number of tokens of each response)."""

    groups: Sequence[tuple[int, Sequence[int]]]
    layers: int = 0
    """number of times that a layer has used this layout"""
    masks: dict[LayerMask, Tensor] = field(default_factory=dict)
    """masks [1, 1, N, N] of the whole row, for the masks of its layers"""

    @property
    def sizes(self) -> list[int]:
        """Numbers of tokens of the prompts and responses, in the order of the row."""
        return list(chain.from_iterable((prompt, *responses) for prompt, responses in self.groups))

    def mask(self, of_layer: LayerMask, device: torch.device) -> Tensor:
        """Return the mask [1, 1, N, N] of the whole row for layers with this mask. It is made once for a row."""
        if of_layer not in self.masks:
            positions, parts = list[Tensor](), list[tuple[int, int]]()
            for group, (prompt, responses) in enumerate(self.groups):
                for part, (start, size) in enumerate([(0, prompt), *((prompt, size) for size in responses)]):
                    positions.append(torch.arange(start, start + size))
                    parts += [(group, part)] * size
            at, (group, part) = torch.cat(positions).to(device), torch.tensor(parts, device=device).t()
            longest = int(at.max()) + 1
            alone = of_layer.of_last(longest, longest)
            seen = at[:, None] >= at if alone is None else alone[0, 0][at[:, None], at]
            same = (group[:, None] == group) & ((part[:, None] == part) | (part == 0))
            self.masks[of_layer] = (seen & same)[None, None]
        return self.masks[of_layer]

    def arguments(self, input_ids: Tensor) -> dict[str, Any]:
        """Return arguments for the model's forward pass. Without a mask, transformers would take the row for packed
        sequences, which begin where positions do not increase by 1."""
        return {"shared_row": self, "attention_mask": torch.ones_like(input_ids)}


class LayerMask:
    """Mask of layers of one type, made when they need it. transformers passes it to the layers in place of a tensor.

    The masks are transformers' own, with the sliding window or chunk of the layers."""

    def __init__(self, **settings: Any) -> None:
        self._make: Callable[..., Tensor | None] = cache(partial(sdpa_mask, **settings))

    def of_row(self) -> Tensor | None:
        """Return the mask of the rows as they are. None is causal attention without window or chunk."""
        return self._make()

    def of_last(self, new: int, whole: int) -> Tensor | None:
        """Return the mask [1, 1, new, whole] of the last `new` tokens of a sequence of `whole` tokens, or None."""
        return self._make(q_length=new, kv_length=whole, q_offset=whole - new, attention_mask=None)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | Tensor | None,
    shared_row: SharedRow | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, N, H, D] of query [1, H, N, D] within each group. If `shared_row` is None, return
    transformers' sdpa attention.

    Raises CannotShare if the layer has a mask of its own."""
    if shared_row is None:
        mask = attention_mask.of_row() if isinstance(attention_mask, LayerMask) else attention_mask
        return sdpa_attention_forward(module, query, key, value, mask, **settings)
    if not isinstance(attention_mask, LayerMask):
        raise CannotShare("its layers do not use the mask that transformers makes")

    if _has_slow_launches(query) and query.shape[2] <= _AT_ONCE:
        return at_once(module, query, key, value, attention_mask, shared_row, **settings), None

    def last(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = attention_mask.of_last(query.shape[2], key.shape[2])
        return sdpa_attention_forward(module, query, key, value, mask, **settings)[0]

    parts = zip(*(tensor.split(shared_row.sizes, dim=2) for tensor in (query, key, value)), strict=True)
    found = []
    for _, responses in shared_row.groups:
        prompt, *owns = (next(parts) for _ in range(1 + len(responses)))
        found.append(last(*prompt))
        mixed = {}
        for batch in _alike(responses):
            together = _responses(prompt, [owns[i] for i in batch], last, attention_mask)
            mixed |= {i: out[None, : responses[i]] for i, out in zip(batch, together, strict=True)}
        found += [mixed[i] for i in sorted(mixed)]
    shared_row.layers += 1
    return torch.cat(found, dim=1), None


def _has_slow_launches(query: Tensor) -> bool:
    return query.is_cuda


def at_once(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask,
    shared_row: SharedRow,
    **settings: Any,
) -> Tensor:
    """Return the attention of `attend` by one call with a mask of the whole row. It starts far fewer kernels, and
    computes scores that the mask hides."""
    shared_row.layers += 1
    mask = shared_row.mask(attention_mask, query.device)
    return sdpa_attention_forward(module, query, key, value, mask, **settings)[0]


def _responses(prompt: Sequence[Tensor], owns: Sequence[Sequence[Tensor]], last: Attend, mask: LayerMask) -> Tensor:
    """Return attention [B, N, H, D] of B responses, padded to N tokens, to their prompt and to themselves. `prompt` and
    each element of `owns` are (query, key, value)."""
    query, *own = (_padded([x[part] for x in owns]) for part in range(3))
    key, value = (_after(x, y) for x, y in zip(prompt[1:], own, strict=True))
    before, whole = prompt[0].shape[2], key.shape[2]
    # causal kernels skip the masked half, so computing a short prompt again costs less than a mask does
    if 2 * before < whole and mask.of_last(whole, whole) is None:
        return last(_after(prompt[0], query), key, value)[:, before:]
    return last(query, key, value)


def _after(prompt: Tensor, own: Tensor) -> Tensor:
    """Return [B, H, n + N, D]: the prompt [1, H, n, D] followed by each response of [B, H, N, D]."""
    return torch.cat([prompt.expand(len(own), -1, -1, -1), own], dim=2)


def _alike(sizes: Sequence[int]) -> list[list[int]]:
    """Return batches of indices of non-empty responses. In a batch the longest response is at most twice as long as the
    shortest."""
    batches: list[list[int]] = []
    for i in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i]):
        if not batches or 2 * sizes[i] < sizes[batches[-1][0]]:
            batches.append([])
        batches[-1].append(i)
    return batches


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors [1, H, n, D] into [B, H, N, D], padded at their ends. Attention is causal, so no token attends to
    padding."""
    return pad_sequence([part[0].transpose(0, 1) for part in parts], batch_first=True).transpose(1, 2)


AttentionInterface.register(_NAME, attend)
AttentionMaskInterface.register(_NAME, LayerMask)


def share_prefixes(model: Any) -> bool:
    """Give `model` the attention for shared prompts, so that its forward accepts the argument `shared_row`. Then run it
    on a short text. If it fails, or if hidden states differ from those without shared prompts, restore the old
    attention. Return whether the new attention is used."""
    before = model.config._attn_implementation
    model.config._attn_implementation = _NAME
    try:
        _compare(model)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # a model may reject the layout in any way
        log.warning(
            "%s cannot share prompts, because %s: the update computes one sequence at a time, which is slower",
            type(model).__name__,
            error,
        )
        model.config._attn_implementation = before
        return False
    return True


@torch.no_grad()
def _compare(model: Any) -> None:
    """Raise CannotShare if hidden states of a shared prompt's responses differ from those of each sequence alone."""
    device, size = model.get_input_embeddings().weight.device, model.config.vocab_size
    types: list[str] = list(getattr(model.config, "layer_types", None) or ())
    if unknown := set(types) - _LAYERS:
        raise CannotShare(f"it has layers of type {min(unknown)}, which shared prompts do not support")
    first, second, third = (size * k // 4 for k in (1, 2, 3))  # not the padding token, whose embedding may be 0
    prompt, responses = [first], [[third], [second, third]]
    row = SharedRow([(1, [1, 2])])
    tokens = torch.tensor([[*prompt, *responses[0], *responses[1]]], device=device)
    positions = torch.tensor([[0, 1, 1, 2]], device=device)
    inputs = {"input_ids": tokens, "position_ids": positions, **row.arguments(tokens)}
    together = model.base_model(**inputs, use_cache=False).last_hidden_state[0]
    if row.layers != model.config.num_hidden_layers:
        raise CannotShare(
            f"its {model.config.num_hidden_layers} layers must each call transformers' attention registry once, and "
            f"the number of calls was {row.layers}"
        )
    for response, own in zip(responses, (together[1:2], together[2:]), strict=True):
        tokens = torch.tensor([[*prompt, *response]], device=device)
        alone = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, 1:]
        if not (alone - own).abs().max() <= _ROUNDING * alone.abs().max():
            raise CannotShare("hidden states of a shared prompt differ from those of each sequence alone")
