"""The bound of the cache, and how it grows. test_rows.py and test_stateful.py check its contents."""

from __future__ import annotations

import pytest
import torch
from tiny import decoder_options

from tlt.attention.key_counts import BLOCK, rounded_down
from tlt.config import EngineConfig
from tlt.engine.engine import Engine
from tlt.engine.kv_cache import KVCache
from tlt.models.decoder import Decoder


def cache_of(dtype: torch.dtype) -> KVCache:
    decoder = Decoder(decoder_options(num_layers=2, num_kv_heads=2, head_dim=4), dtype, torch.device("cpu"))
    return Engine(decoder, EngineConfig(kv_memory_mb=1)).cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bound_in_bytes_is_kept_to_the_last_block_of_keys(dtype: torch.dtype) -> None:
    cache = cache_of(dtype)
    one_token = 2 * 2 * 2 * 4 * dtype.itemsize  # keys and values, layers, heads, numbers
    assert cache.bound_tokens == 2**20 // one_token
    most = rounded_down(cache.bound_tokens // 2, cache.store.key_counts)
    cache.reserve(2, most)
    in_use = sum(t.nbytes for t in cache.store.layers)
    assert 2**20 - 2 * BLOCK * one_token < in_use == 2 * most * one_token <= 2**20
    with pytest.raises(AssertionError):
        cache.reserve(2, most + 1)


def test_the_cache_grows_in_advance_so_that_few_tokens_cost_no_copy() -> None:
    cache = cache_of(torch.float32)
    sizes = set()
    for tokens in range(1, 1000):
        cache.reserve(4, tokens)
        sizes.add(cache.store.tokens)
    assert len(sizes) < 10
