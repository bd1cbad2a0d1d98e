"""Attention for shared prompts: one row holds a prompt once, followed by all responses to it.

Each response attends to the prompt and to itself. Its positions continue those of the prompt. `attend` is registered
with transformers, so it serves every model whose attention layers use that registry.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

log = logging.getLogger(__name__)

_NAME = "tlt_shared_prefix"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")
_LAYERS = {"full_attention", "sliding_attention"}
_ROUNDING = 1e-4  # largest difference of hidden states by rounding, relative to the largest hidden state


class CannotShare(RuntimeError):
    """Error for a model whose attention needs something that `attend` does not support."""


@dataclass
class SharedRow:
    """Layout of a row that concatenates groups: prompts, each followed by its responses. A group is given as (number of
    prompt tokens, number of tokens of each response)."""

    groups: Sequence[tuple[int, Sequence[int]]]
    device: torch.device
    windows: list[int | None] = field(default_factory=list)
    """sliding window in tokens of each layer that has used this layout; None is full attention"""
    _masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """Numbers of tokens of the prompts and responses, in the order of the row."""
        return list(chain.from_iterable((prompt, *responses) for prompt, responses in self.groups))

    def mask(self, before: int, own: int, window: int | None) -> Tensor:
        """Return a bool mask [own, before + own]: `own` tokens attend to `before` tokens and causally to each other.

        `window` is a sliding window in tokens. Each mask is computed once for all layers."""
        window = window if window and window < before + own else None
        key = (before, own, window)
        if key not in self._masks:
            mask = torch.ones(own, before + own, dtype=torch.bool, device=self.device).tril(before)
            self._masks[key] = mask.triu(before + 1 - window) if window else mask
        return self._masks[key]

    def predicting(self, hidden: Tensor) -> Tensor:
        """Select the hidden states that predict response tokens: [1, N, D] -> [tokens of all responses, D].

        A prompt's last token predicts the first token of each of its responses."""
        parts = iter(hidden[0].split(self.sizes))
        found = []
        for _, responses in self.groups:
            last = next(parts)[-1:]
            for own in islice(parts, len(responses)):
                found += [last, own[:-1]] if len(own) else []
        return torch.cat(found)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    shared_row: SharedRow | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, N, H, D] of query [1, H, N, D] within each group. If `shared_row` is None, call
    transformers' sdpa attention.

    Raises CannotShare if `settings` has an option that is not supported."""
    if shared_row is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    _refuse(settings)
    scaling, window = settings.get("scaling"), settings.get("sliding_window")
    parts = zip(*(tensor.split(shared_row.sizes, dim=2) for tensor in (query, key, value)), strict=True)
    found = []
    for before, responses in shared_row.groups:
        query, key, value = next(parts)
        mask = shared_row.mask(0, before, window) if window and window < before else None
        found.append(_sdpa(query, key, value, mask, scaling))
        owns = [next(parts) for _ in responses]
        mixed = {}
        for batch in _alike(responses):
            together = _responses([query, key, value], [owns[i] for i in batch], shared_row, window, scaling)
            mixed |= {i: out[None, :, : responses[i]] for i, out in zip(batch, together, strict=True)}
        found += [mixed[i] for i in sorted(mixed)]
    shared_row.windows.append(window)
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


def _responses(
    prompt: Sequence[Tensor],
    owns: Sequence[Sequence[Tensor]],
    row: SharedRow,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Return attention [B, H, N, D] of B responses, padded to N tokens, to their prompt and to themselves. `prompt` and
    each element of `owns` are (query, key, value)."""
    query, *own = (_padded([x[part] for x in owns]) for part in range(3))
    key, value = (_after(x, y) for x, y in zip(prompt[1:], own, strict=True))
    before, whole = prompt[0].shape[2], key.shape[2]
    # causal kernels skip the masked half, so computing a short prompt again costs less than a mask does
    if 2 * before < whole and not (window and window < whole):
        return _sdpa(_after(prompt[0], query), key, value, None, scaling)[:, :, before:]
    return _sdpa(query, key, value, row.mask(before, whole - before, window), scaling)


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


def _refuse(settings: dict[str, Any]) -> None:
    if names := [name for name in _UNSUPPORTED if settings.get(name) is not None]:
        raise CannotShare(f"its attention uses {names[0]}, which shared prompts do not support")
    if settings.get("dropout"):
        raise CannotShare("its attention uses dropout, which shared prompts do not support")
    if settings.get("is_causal") is False:
        raise CannotShare("its attention is not causal")


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Return attention with `mask`, or causal attention if `mask` is None."""
    share = query.shape[1] // key.shape[1]
    grouped = share > 1 and (mask is None or query.device.type == "cpu")  # CUDA: no fast kernel for GQA with a mask
    if share > 1 and not grouped:
        key, value = repeat_kv(key, share), repeat_kv(value, share)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


AttentionInterface.register(_NAME, attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def share_prefixes(model: Any) -> bool:
    """Give `model` the attention for shared prompts, so that its forward accepts the argument `shared_row`. Then run it
    on a short text. If it fails, or if hidden states differ from those without shared prompts, restore the old
    attention. Return whether the new attention is used."""
    before = model.config._attn_implementation
    model.config._attn_implementation = _NAME
    try:
        _compare(model)
    except (TypeError, ValueError, RuntimeError) as error:  # a model may reject the layout in any way
        log.warning(
            "%s cannot share prompts, because %s: the update computes each prompt once per response, which is slower",
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
    prompt, responses = [first], [[second, third], [third]]
    row = SharedRow([(1, [2, 1])], device)
    tokens = torch.tensor([[*prompt, *responses[0], *responses[1]]], device=device)
    positions = torch.tensor([[0, 1, 2, 1]], device=device)
    inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": no_mask(device)}
    together = model.base_model(**inputs, use_cache=False, shared_row=row).last_hidden_state[0]
    if len(row.windows) != model.config.num_hidden_layers:
        raise CannotShare(
            f"its {model.config.num_hidden_layers} layers must each call transformers' attention registry once, and "
            f"the number of calls was {len(row.windows)}"
        )
    if sum(window is not None for window in row.windows) < types.count("sliding_attention"):
        raise CannotShare("its sliding-window layers do not pass their window size")
    for response, own in zip(responses, (together[1:3], together[3:]), strict=True):
        tokens = torch.tensor([[*prompt, *response]], device=device)
        alone = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, 1:]
        if not (alone - own).abs().max() <= _ROUNDING * alone.abs().max():
            raise CannotShare("hidden states of a shared prompt differ from those of each sequence alone")


def no_mask(device: torch.device) -> Tensor:
    """Return a [1, 1, 1, 1] mask of True. transformers passes a 4D mask on unchanged. If the mask is None, it builds
    one of [N, N] from the positions."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
