"""Reference for the engine and its cache: the decoder with causal attention over whole rows, without a cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tlt.models.decoder import Decoder


def causal_hidden(target: Decoder, tokens: Tensor) -> Tensor:
    """Return hidden states [R, W, D] after the final norm, for tokens [R, W]: R rows, which may be right-padded."""
    options, (rows, width) = target.options, tokens.shape
    share = options.num_heads // options.num_kv_heads

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        query, key, value = (x.unflatten(0, (rows, width)).transpose(1, 2) for x in (query, key, value))
        key, value = (x.repeat_interleave(share, dim=1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * options.head_dim**-0.5
        causal = torch.ones(width, width, dtype=torch.bool, device=target.device).tril().triu(1 - (window or width))
        weights = torch.softmax(scores.masked_fill(~causal, -math.inf), dim=-1)
        return (weights @ value).transpose(1, 2).reshape(rows * width, -1)

    return target.forward(tokens, torch.arange(width, device=target.device).expand_as(tokens), attend)
