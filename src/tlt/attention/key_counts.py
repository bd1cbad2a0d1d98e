"""Numbers of keys over which PyTorch's attention sums in one order, however many of the keys are masked. Numbers of
queries with which it does so too.

On a CPU, `scaled_dot_product_attention` takes 512 keys at a time, and the rest in a smaller product. The order of sums
in a small product depends on its size. For example, MKL sums over 256 float32 values as 128 + 128 on an AMD CPU, but
over 512 as 192 + 192 + 128. So a sequence that is padded to 256 keys has other bits than if it is padded to 512. On an
Intel CPU, MKL sums over 128 float32 values in one order for 4 queries, and in another for 8 or more.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 512  # keys that the kernel takes at a time
QUERIES = 128  # most queries per key-value head in a call on a CPU; from 192 on, the kernel sums in another order
_STEP = 64  # sizes of the last block that are tried are multiples of this
_QUERIES = (4, 32, 36)  # numbers of queries that are tried
_OFFSET = 1024.0  # added to all scores, so that weights in bfloat16 show the last bits of a score in float32


@cache
def key_counts(head_dim: int, dtype: torch.dtype, device_type: str) -> tuple[int, ...]:
    """Return the sizes of a last block of keys that give the bits of a block of `BLOCK` keys whose rest is masked. They
    are found by comparing bits, so they are the same at each start on a machine.

    On other devices than a CPU, only `BLOCK` is returned, because each number of keys needs CUDA graphs of its own."""
    if device_type != "cpu":
        return (BLOCK,)
    lengths = range(_STEP // 2, BLOCK + 1, _STEP // 2)
    sequences = zip(*(_sequence(n, head_dim, dtype) for n in lengths), strict=True)
    case = [torch.stack(parts).unsqueeze(1) for parts in sequences]
    masks = torch.zeros(len(lengths), 1, 1, BLOCK, dtype=dtype)
    for mask, length in zip(masks, lengths, strict=True):
        mask[..., length:] = -torch.inf
    wanted = [_attention(case, masks, queries, BLOCK) for queries in _QUERIES]

    def has_the_same_bits(size: int) -> bool:
        rows = size // lengths.step  # sequences of up to `size` tokens
        some, shown = [x[:rows] for x in case], masks[:rows]
        pairs = zip(_QUERIES, wanted, strict=True)
        return all(torch.equal(_attention(some, shown, queries, size), whole[:rows]) for queries, whole in pairs)

    return (*filter(has_the_same_bits, range(_STEP, BLOCK, _STEP)), BLOCK)


@cache
def full_queries(head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of queries of which a call on a CPU needs a multiple, so that the bits of a query do not depend
    on the number of queries. It is at least 4, and found as in `key_counts`."""
    case = [x[None, None] for x in _sequence(BLOCK, head_dim, dtype, QUERIES)]
    mask = torch.zeros(1, 1, 1, BLOCK, dtype=dtype)
    whole = _attention(case, mask, QUERIES, BLOCK)

    def has_the_same_bits(full: int) -> bool:
        counts = range(full, QUERIES, full)
        return all(torch.equal(_attention(case, mask, count, BLOCK), whole[:, :, :count]) for count in counts)

    return next(filter(has_the_same_bits, (4, 8, 16, 32, 64)), QUERIES)


def rounded_up(tokens: int, counts: tuple[int, ...]) -> int:
    """Return the smallest number from `tokens` on that is a multiple of `BLOCK`, or a multiple plus one of `counts`."""
    blocks, rest = divmod(tokens, BLOCK)
    return blocks * BLOCK + (next(count for count in counts if count >= rest) if rest else 0)


def rounded_down(tokens: int, counts: tuple[int, ...]) -> int:
    """Return the largest number up to `tokens` that is a multiple of `BLOCK`, or a multiple plus one of `counts`."""
    blocks, rest = divmod(tokens, BLOCK)
    return blocks * BLOCK + max(count for count in (0, *counts) if count <= rest)


def _sequence(
    length: int, head_dim: int, dtype: torch.dtype, most: int = max(_QUERIES)
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `most` queries, and the keys and values, [n, E] each, of a sequence of `length` tokens. Equal keys have
    opposite values. So the exact output is 0, and a computed one consists of rounding errors, which depend on the order
    of the sums."""
    random = torch.Generator().manual_seed(length)
    order = torch.randperm(length, generator=random)
    keys, values = (torch.randn(length // 2, head_dim, generator=random) for _ in range(2))
    queries = torch.randn(most, head_dim, generator=random)
    queries[:, 0] = keys[:, 0] = (_OFFSET * head_dim**0.5) ** 0.5
    pairs = torch.cat([keys, keys])[order], torch.cat([values, -values])[order]
    keys, values = (F.pad(x, (0, 0, 0, BLOCK - length)).to(dtype) for x in pairs)
    return queries.to(dtype), keys, values


def _attention(case: list[Tensor], masks: Tensor, queries: int, tokens: int) -> Tensor:
    query, keys, values = case
    mask = masks[..., :tokens].expand(-1, 1, queries, tokens)
    return F.scaled_dot_product_attention(query[:, :, :queries], keys[:, :, :tokens], values[:, :, :tokens], mask)
