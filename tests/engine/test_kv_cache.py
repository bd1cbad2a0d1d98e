"""The bound of the cache, how it grows, and keys and values kept between two turns of an episode. test_rows.py and
test_stateful.py check the contents of slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import decoder_options

from tlt.attention.key_counts import BLOCK, rounded_down
from tlt.config import EngineConfig
from tlt.draft.features import SavedEntries
from tlt.engine.engine import Engine
from tlt.engine.kv_cache import KVCache, TurnStore
from tlt.models.decoder import Decoder
from tlt.types import Prompt, Request, Row, SamplingParams


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


class Cache:
    """Cache that saves a size instead of keys and values."""

    def save(self, place: int, length: int) -> Any:
        values = type("Values", (), {"nbytes": length})()
        return type("Saved", (), {"values": values})()

    def restore(self, place: int, saved: Any) -> None: ...


class Window:
    """Feature window that notes what is restored. Its entries take 5 bytes."""

    def __init__(self) -> None:
        self.restored: list[tuple[int, Any]] = []

    def save(self, place: int) -> SavedEntries:
        return SavedEntries(place, torch.zeros(5, 1, dtype=torch.int8), torch.zeros(0))

    def restore(self, place: int, saved: SavedEntries) -> None:
        self.restored.append((place, saved.first))


def row(*tokens: int, seed: int = 1, **changes: Any) -> Row:
    sampling = SamplingParams(continues=changes.pop("continues", True))
    return Row(Request(Prompt(0, "", (7, 8)), 0, 0, seed, sampling), list(tokens), **changes)


def left(*rows: Row) -> TurnStore:
    """Return a store after these rows have left their engine."""
    cache: Any = Cache()
    store = TurnStore(cache, None)
    for one in rows:
        store.append(one, 0)
        store.remove(0, 0)
    return store


def test_keys_and_values_are_used_by_the_row_that_continues() -> None:
    """The last token has none yet, because they are computed when the next one is decoded. Of 7 8 1 2 3 four are
    kept."""
    assert left(row(1, 2, 3)).known(row(1, 2, 3, 4, 5)) == 4


@pytest.mark.parametrize("other", [row(1, 9, 3, 4), row(1), row(), row(1, 2, 3, 4, seed=2)])
def test_a_row_with_other_tokens_uses_none(other: Row) -> None:
    assert left(row(1, 2, 3)).known(other) == 0


@pytest.mark.parametrize("gone", [row(1, 2, continues=False), row(1, 2, finite=False), row(1, 2, ahead=True), row()])
def test_a_row_that_does_not_continue_leaves_nothing(gone: Row) -> None:
    assert left(gone).bytes == 0


def test_the_oldest_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.engine.kv_cache._MOST_BYTES", 9)
    store = left(row(1, 2, 3, seed=1), row(1, 2, 3, seed=2), row(1, 2, 3, seed=3))
    assert [store.known(row(1, 2, 3, 4, seed=seed)) for seed in (1, 2, 3)] == [0, 4, 4]
    assert store.bytes == 8


def test_a_later_copy_of_a_row_replaces_the_earlier_one() -> None:
    assert left(row(1, 2, 3), row(1, 2, 3)).bytes == 4


def test_the_drafter_gets_its_hidden_states_back_in_the_next_turn() -> None:
    cache: Any = Cache()
    window: Any = Window()
    store = TurnStore(cache, window)
    for seed in (1, 2):
        store.append(row(1, 2, 3, seed=seed), 0)
    store.remove(1, 1)
    assert store.bytes == 4 + 5, "both count"
    store.restore(6, row(1, 2, 3, 4, seed=2))
    assert window.restored == [(6, 1)]
    assert store.bytes == 0
