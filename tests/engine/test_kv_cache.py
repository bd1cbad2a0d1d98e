"""The cache against a plain dict: values survive any resize, copy and move, and the bound holds."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny import decoder_options

from tlt.attention.backend import HeadShape
from tlt.attention.slots import SlotAttention
from tlt.config import EngineConfig
from tlt.engine.engine import Engine
from tlt.engine.kv_cache import KVCache
from tlt.models.decoder import Decoder

CPU = torch.device("cpu")
LAYERS, HEADS, HEAD_DIM = 2, 2, 4


def cache_of(bound_tokens: int) -> KVCache:
    return KVCache(SlotAttention(HeadShape(LAYERS, HEADS, HEADS, HEAD_DIM, torch.float32, CPU)), bound_tokens)


class CacheMachine(RuleBasedStateMachine):
    """`model` maps (slot, place) to the number written there. Other places may hold anything."""

    @initialize(bound=st.integers(20, 900))
    def start(self, bound: int) -> None:
        self.cache = cache_of(bound)
        self.model: dict[tuple[int, int], float] = {}
        self.written = 0.0

    def store_number(self, slot: int, place: int, number: float) -> None:
        for layer in range(LAYERS):
            self.cache.store.layers[layer][0][slot, :, place] = number + layer
            self.cache.store.layers[layer][1][slot, :, place] = -number - layer

    def keep_only_allocated(self) -> None:
        store = self.cache.store
        self.model = {k: v for k, v in self.model.items() if k[0] < store.slots and k[1] < store.tokens}

    @rule(slots=st.integers(1, 12), tokens=st.integers(1, 150))
    def reserve(self, slots: int, tokens: int) -> None:
        if not self.cache.fits(slots, tokens):
            with pytest.raises(AssertionError):
                self.cache.reserve(slots, tokens)
            return
        self.cache.reserve(slots, tokens)
        assert self.cache.store.slots >= slots
        assert self.cache.store.tokens >= tokens
        self.keep_only_allocated()

    @rule()
    def release(self) -> None:
        self.cache.release()
        assert self.cache.store.slots * self.cache.store.tokens == 0
        self.model = {}

    @precondition(lambda self: self.cache.store.slots and self.cache.store.tokens)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, self.cache.store.slots - 1))
        for place in data.draw(st.sets(st.integers(0, self.cache.store.tokens - 1), max_size=8)):
            self.written += 10
            self.store_number(slot, place, self.written)
            self.model[slot, place] = self.written

    @precondition(lambda self: self.cache.store.slots and self.cache.store.tokens)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        a_slot = st.integers(0, self.cache.store.slots - 1)
        source, target = data.draw(a_slot), data.draw(a_slot)
        length = data.draw(st.integers(0, self.cache.store.tokens))
        self.cache.copy(source, target, length)
        copied = {place: v for (slot, place), v in self.model.items() if slot == source and place < length}
        self.model = {k: v for k, v in self.model.items() if k[0] != target or k[1] >= length}
        self.model |= {(target, place): number for place, number in copied.items()}

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Apply all moves at once, because a source may be the target of another move."""
        a_move = st.tuples(st.sampled_from(sorted(self.model)), st.integers(0, self.cache.store.tokens - 1))
        moves = data.draw(st.lists(a_move, min_size=1, max_size=6, unique_by=lambda move: (move[0][0], move[1])))
        rows, sources, targets = (torch.tensor(x) for x in zip(*((s, p, t) for (s, p), t in moves), strict=True))
        self.cache.move(rows, sources, targets)
        before = dict(self.model)
        for (slot, place), target in moves:
            self.model[slot, target] = before[slot, place]

    @invariant()
    def within_the_bound(self) -> None:
        assert self.cache.store.slots * self.cache.store.tokens <= self.cache.bound_tokens

    @invariant()
    def holds_what_was_written(self) -> None:
        for (slot, place), number in self.model.items():
            for layer in range(LAYERS):
                assert bool((self.cache.store.layers[layer][0][slot, :, place] == number + layer).all())
                assert bool((self.cache.store.layers[layer][1][slot, :, place] == -number - layer).all())


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bound_in_bytes_is_kept_to_the_last_token(dtype: torch.dtype) -> None:
    decoder = Decoder(decoder_options(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM), dtype, CPU)
    cache = Engine(decoder, EngineConfig(kv_memory_mb=1)).cache
    cache.reserve(2, cache.bound_tokens // 2)
    in_use = sum(t.nbytes for t in cache.store.layers)
    one_token = 2 * LAYERS * HEADS * HEAD_DIM * dtype.itemsize
    assert 2**20 - 2 * one_token < in_use <= 2**20


def test_the_cache_grows_in_advance_so_that_few_tokens_cost_no_copy() -> None:
    cache = cache_of(100_000)
    sizes = []
    for tokens in range(1, 1000):
        cache.reserve(4, tokens)
        sizes.append(cache.store.tokens)
    assert len(set(sizes)) < 10
