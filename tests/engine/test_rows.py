"""Places of rows, prompts in free slots, and the ledger that checks them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import small
import torch
from small import Target, by_seed, cache_for, finish, reference
from torch import Tensor

import tlt.engine.committing
from tlt.config import EngineConfig
from tlt.draft.ahead import Ahead, AheadStore
from tlt.draft.features import FeatureLayout, Harvest
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.engine import Engine
from tlt.engine.kv_cache import KVCache
from tlt.engine.rows import RowTable
from tlt.engine.scheduler import place_new_rows
from tlt.engine.tuner import Fixed
from tlt.types import Request, Row

TARGET = Target(seed=0)
request = partial(small.request, temperature=0.7)


def right(asked: Request) -> list[int]:
    return reference(TARGET, [asked])[0].token_ids


def row(prompt: Sequence[int], seed: int, tokens: Sequence[int] = ()) -> Row:
    return Row(request(prompt, seed), list(tokens))


def filled(slots: int, *prompts: Sequence[int]) -> tuple[KVCache, RowTable]:
    """Return a cache with this many slots, through which rows with these prompts went. None of them is active."""
    cache = cache_for(TARGET.decoder, 10_000)
    table = RowTable([cache])
    cache.reserve(slots, 50)
    for number, prompt in enumerate(prompts):
        table.append(row(prompt, number))
    while len(table):
        table.remove(len(table) - 1)
    return cache, table


def test_a_free_slot_keeps_its_prompt_until_it_changes() -> None:
    a, b = (1, 2, 3), (4, 0)
    cache, _ = filled(3, a, b)
    assert [cache.held(slot) for slot in range(4)] == [a, b, (), ()]
    cache.reserve(1, 200)  # the tail grows its own slots alone
    assert cache.store.slots == 1
    assert [cache.held(slot) for slot in range(2)] == [a, ()]
    cache.wipe(0, 0)
    assert cache.held(0) == ()
    cache, _ = filled(2, a, [3] * 40)
    cache.bound_tokens = 4 * 30
    cache.reserve(4, 20)  # more slots, each of them shorter than the second prompt
    assert cache.store.tokens == 30
    assert [cache.held(slot) for slot in range(4)] == [a, (), (), ()]
    for forget in (KVCache.release, KVCache.clear):
        cache, _ = filled(3, a, b)
        forget(cache)
        assert [cache.held(slot) for slot in range(3)] == [(), (), ()]


def test_rows_find_their_prompt_in_free_slots_or_at_a_sibling() -> None:
    a, b, c = (1, 2, 3), (4, 0), (2, 2)
    cache, table = filled(3, a, b)
    new = [row(c, 30), row(b, 20), row(a, 11, tokens=[3]), row(a, 10), row(c, 31), row(b, 21)]
    kept, fresh, copies = place_new_rows(new, table, cache)
    assert [r.request.seed for r in kept] == [10, 20], "in the order of the places"
    assert [r.request.seed for r in fresh] == [30, 11], "one that was begun has more than its prompt to fill in"
    assert [r.request.seed for r in copies] == [31, 21]
    live = row(a, 12)
    kept, fresh, copies = place_new_rows([row(a, 13)], [live], cache)
    assert (len(kept), len(fresh), len(copies)) == (0, 0, 1), "place 1 holds another prompt, but a sibling is live"


def test_a_target_that_changes_during_a_rollout_is_an_error() -> None:
    target = Target(seed=0)
    engine = small.build(target)
    engine.start([request((1, 2, 3), 0, 30)])
    engine.round()
    target.decoder.load(target.model.state_dict(), version=1)
    with pytest.raises(AssertionError, match="call start"):
        engine.round()


def speculating() -> Engine:
    drafter = small.ContextDrafter(TARGET, 0.7, 0.7)
    return small.build(TARGET, drafter, Strategy("", 6), max_rows=4, bound_tokens=130)


def run(engine: Engine) -> None:
    for _ in engine.generate([request((1, 2, 3) * (1 + n % 3), n, 15 + 5 * (n % 4)) for n in range(9)]):
        pass


def forgetful(self: KVCache, slots: int, tokens: int, resize: Any = KVCache._resize) -> None:
    """Resize, but keep the list of prompts that slots hold, and forget what the ledger knows."""
    held = list(self._held)
    resize(self, slots, tokens)
    self._held[: len(held)] = held[:slots]
    self.ledger.booked.zero_()


FAULTS = {
    "copies": (KVCache, "copy", lambda self, *slots: None),
    "a slot that lost its tokens": (KVCache, "_resize", forgetful),
    "accepted tokens": (tlt.engine.committing, "num_accepted", lambda draft, sampled: len(draft.tokens)),
    "weights": (Engine, "round", lambda self, one=Engine.round: self.cache.check(7) or one(self)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_ledger_finds_wrong_content_of_a_slot(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    engine = speculating()
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError, match=r"slot \d+ has wrong keys and values"):
        run(engine)


class Poisoned(small.Decoder):
    """Target in which one token has hidden states, keys and values that are not finite, and so have all tokens that
    attend to it."""

    token = 4

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any, taps: Any = None) -> Tensor:
        bad = (tokens == self.token).view(-1, 1, 1)

        def spoiled(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = (torch.where(bad, torch.nan, x) for x in (key, value))
            return attend(layer, query, key, value)

        return super().forward(tokens, positions, spoiled, taps)


def poisoned() -> Poisoned:
    made = Poisoned(TARGET.decoder.options, torch.float64, torch.device("cpu"))
    made.load(TARGET.model.state_dict(), version=0)
    return made


def some(prompt: Sequence[int], begin: int, new_tokens: int, bad: bool = False) -> Request:
    """Return a request whose response has token 4 among its first two (`bad`) or not at all."""
    asked = (request(prompt, n, new_tokens) for n in range(begin, begin + 1000))
    return next(r for r in asked if bad == (4 in right(r)[: 2 if bad else None]))


@pytest.mark.parametrize("where", ["prompt", "response"])
@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_a_row_that_is_not_finite_affects_no_other_row(max_rows: int, where: str) -> None:
    """Rows that use its slot before, during or after it get their own tokens."""
    good = [some((1, 2, 3), 1000 * n, 6) for n in range(9)]
    bad = request((1, 4, 3), 9000, 6) if where == "prompt" else some((2, 2), 9000, 6, bad=True)
    asked = [good[0], bad, *good[1:5], dataclasses.replace(bad, seed=bad.seed + 1), *good[5:]]
    found = list(Engine(poisoned(), EngineConfig(max_rows=max_rows, prefill_tokens=8)).generate(asked))
    assert all(by_seed(found)[r.seed] == right(r) for r in good)
    assert not all(math.isfinite(x) for r in found if r.request is bad for x in r.full_logprobs)


def test_an_abandoned_rollout_leaves_no_values_that_are_not_finite() -> None:
    good = [some((2, 2), 0, 4), some((1, 2, 3) * 8, 1000, 4)]
    engine = Engine(poisoned(), EngineConfig(max_rows=2, prefill_tokens=4))
    engine.start([request((4, 2, 1, 0, 2, 1, 0, 0, 1, 1), 9000 + n, 12) for n in range(2)])
    engine.round()
    engine.round()
    assert by_seed(engine.generate(good)) == {r.seed: right(r) for r in good}


@pytest.mark.parametrize("moves", [True, False], ids=["a row that leaves its slot for another", "a row that ends"])
def test_values_that_are_not_finite_do_not_reach_the_next_row(moves: bool) -> None:
    """A longer row is in the same batch, so that the memory after the next row's own tokens is read too."""
    short, long, late = some((1, 2, 3), 0, 3), some((1, 2), 1000, 25), some((3,), 3000, 6)
    bad = some((2, 2, 1, 1), 2000, 20 if moves else 8, bad=True)
    engine = Engine(poisoned(), EngineConfig(max_rows=3))
    engine.start([short, long, bad] if moves else [long, bad])
    found = [r for _ in range(4 if moves else 8) for r in engine.round()]
    assert [row.request for row in engine.rows] == ([bad, long] if moves else [long])
    engine.submit([late])
    found += finish(engine)
    assert not all(math.isfinite(x) for r in found if r.request is bad for x in r.full_logprobs)
    assert all(by_seed(found)[r.seed] == right(r) for r in ((short, long, late) if moves else (long, late)))


def test_values_that_are_not_finite_are_no_training_data() -> None:
    asked = [request((1, 2, 3), n, 30) for n in range(20)]
    bad = {r.seed for r in asked if 4 in right(r)[:-1]}
    assert 0 < len(bad) < len(asked)
    items: list[Harvest] = []
    layout = FeatureLayout((0,), 8)
    engine = Engine(poisoned(), EngineConfig(max_rows=3), layout=layout, on_harvest=items.append)
    responses = list(engine.generate(asked))
    assert all(item.features.isfinite().all() for item in items)
    ends = [tuple(item.tokens.tolist()) for item in items]
    for response in responses:
        end = tuple(response.token_ids[-8:])
        assert (end in ends) == (response.request.seed not in bad)


class Sure(small.PrefixDrafter):
    """Drafter that always proposes the same token."""

    name = "sure"

    def propose(self, prefixes: Sequence[small.Prefix]) -> small.Offer:
        return small.Offer(torch.full((len(prefixes), 1), 4), torch.zeros(len(prefixes), 1))


def test_a_draft_with_values_that_are_not_finite_changes_no_token() -> None:
    asked = (request((1, 2, 3) * (1 + 2 * (n % 2)), n, 9) for n in range(120))  # the shorter ones are read beyond
    good = [r for r in asked if 4 not in right(r)][:6]
    engine = Engine(poisoned(), EngineConfig(max_rows=3), [Sure()], Fixed(Strategy("sure", 3)))
    found = {r.request.seed: r for r in engine.generate(good)}
    assert engine.stats.drafted < engine.stats.row_passes / 4, "each such round is decided by its roots"
    for one, want in zip(good, reference(TARGET, good), strict=True):
        assert found[one.seed].token_ids == want.token_ids
        assert found[one.seed].logprobs == pytest.approx(want.logprobs, abs=1e-9)


def test_a_row_that_is_not_finite_costs_the_others_no_draft() -> None:
    bad, good = request((1, 4, 3), 9000, 30), some((1, 2, 3), 0, 30)
    drafter = small.ContextDrafter(TARGET, 1.0, 0.0)
    engine = Engine(poisoned(), EngineConfig(max_rows=2), [drafter], Fixed(Strategy("context", 3)))
    found = by_seed(engine.generate([bad, good]))
    assert found[good.seed] == right(good)
    assert engine.stats.accepted > 15


def test_a_row_that_is_not_finite_gets_no_look_ahead_draft() -> None:
    bad, store = request((1, 4, 3), 9000, 30), AheadStore(100)
    (known,) = Engine(poisoned(), EngineConfig()).generate([bad])
    store.put([Ahead.of(known, -1, ended=True)])
    engine = Engine(poisoned(), EngineConfig(), (), Fixed(PLAIN._replace(ahead=16)), store=store)
    (found,) = engine.generate([bad])
    assert found.token_ids == known.token_ids
    assert engine.stats.drafted == 0
