"""Rows of coming steps that leave and come back: they go on from where they stood, and no other row sees what they
bring."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from small import Reference, Target, check_tokens, reference
from test_look_ahead import CHAIN, ahead, engine, expected, requests, target

from tlt.draft.ahead import AheadStore
from tlt.draft.strategy import PLAIN
from tlt.engine.engine import Engine
from tlt.types import Request, Response


@cache
def other_target() -> Target:
    return Target(seed=4)


@cache
def expected_of(seed: int) -> dict[int, Reference]:
    """By request."""
    said = expected() if seed == 3 else reference(other_target(), requests())
    return {request.seed: known for request, known in zip(requests(), said, strict=True)}


def rounds(looking: Engine, count: int) -> None:
    for _ in range(count):
        if looking.looks_ahead:
            looking.round()


def update(looking: Engine, seed: int) -> None:
    weights = target() if seed == 3 else other_target()
    looking.release()
    looking.target.load(weights.model.state_dict(), version=looking.target.version + 1)


@pytest.fixture(autouse=True)
def same_weights_behind() -> object:
    yield
    target().decoder.load(target().model.state_dict(), version=0)


@pytest.mark.parametrize("strategy", [PLAIN, CHAIN], ids=lambda s: s.name)
def test_a_row_that_comes_back_says_what_it_would_have_said(strategy: type) -> None:
    store = AheadStore(10**6)
    looking = engine(store, strategy)
    while not all(store.has_ended(request) for request in requests()):
        looking.look_ahead([request for request in requests() if not store.has_ended(request)])
        rounds(looking, 3)
        looking.release()
    for request, known in zip(requests(), expected(), strict=True):
        found = store.get(request)
        assert found is not None
        assert found.tokens.tolist() == list(known.token_ids)
    assert looking.stats.ahead_tokens == sum(len(known.token_ids) for known in expected()), "no token was decoded twice"
    assert looking.parking.tokens == 0


def test_what_a_drafter_reads_comes_back_too() -> None:
    looking = engine(AheadStore(10**6), CHAIN)
    looking.look_ahead(requests()[2:3])
    window = looking.rollout.window
    assert window is not None
    while window.live == 0 or window.length[0] <= window.window:
        looking.round()
    start, length = window.start(0), window.length[0]
    before = window.read(0, start, length)
    looking.look_ahead(())
    looking.look_ahead(requests()[2:3])
    looking._admit()
    assert (window.first[0], window.start(0), window.length[0]) == (start, start, length), "older ones are gone"
    assert all(torch.equal(old, new) for old, new in zip(before, window.read(0, start, length), strict=True))


def test_a_round_that_failed_leaves_nothing_to_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    looking = engine(AheadStore(10**6), PLAIN)
    looking.look_ahead(requests()[2:3])
    rounds(looking, 3)
    monkeypatch.setattr(looking, "_commit", None)
    with pytest.raises(TypeError):
        looking.round()
    looking.start(())
    assert looking.parking.tokens == 0


def test_after_an_update_nothing_is_computed_again() -> None:
    looking = engine(AheadStore(10**6), PLAIN)
    looking.look_ahead(requests()[2:3])
    rounds(looking, 10)
    update(looking, 4)
    looking.start(())
    prefilled: list[Sequence[int]] = []
    plain = looking.rollout.runner.prefill
    looking.rollout.runner.prefill = lambda first, contexts, known: prefilled.extend(contexts) or plain(first, contexts)  # type: ignore
    looking.look_ahead(requests()[2:3])
    rounds(looking, 1)
    assert prefilled == []
    assert len(looking.rows[0].tokens) == 11
    looking.look_ahead(())
    found = looking.store.get(requests()[2])
    assert found is not None
    assert found.version == looking.target.version


@pytest.mark.parametrize("seed", range(6))
def test_what_they_bring_reaches_no_row_of_this_step(seed: int) -> None:
    """Their keys and values are of older targets, those of this step never: with prompts in common, small caches, and
    updates between them."""
    rng = random.Random(seed)
    small = rng.choice([None, 400])
    looking = engine(AheadStore(10**6), rng.choice([PLAIN, CHAIN]), max_rows=rng.choice([3, 8]), kv_tokens=small)
    for turn in range(6):
        weights = 4 if turn % 2 else 3
        update(looking, weights)
        looking.start(())
        own: list[Request] = rng.sample(requests(), 4)
        others = [request for request in requests() if request not in own]
        responses: list[Response] = []
        for _ in range(3):
            looking.look_ahead(rng.sample(others, 6))
            rounds(looking, rng.randrange(4))
        looking.submit(own)
        while looking.busy:
            responses += looking.round()
            if rng.random() < 0.2:
                looking.look_ahead(rng.sample(others, 6))
        check_tokens(responses, [expected_of(weights)[response.request.seed] for response in responses])
        assert len(responses) == len(own)
        assert looking.parking.tokens <= looking.cache.bound_tokens


def test_what_is_parked_takes_a_bounded_part_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    looking = engine(AheadStore(10**6), PLAIN)
    looking.look_ahead(requests())
    rounds(looking, 3)
    looking.look_ahead(())
    size = looking.parking.bytes
    assert size == sum(parked.keys_values.nbytes for parked in looking.parking._parked.values()) > 0
    monkeypatch.setattr("tlt.engine.parking.MOST_BYTES", size // 2)
    looking.look_ahead(requests())
    rounds(looking, 3)
    looking.look_ahead(())
    assert 0 < looking.parking.bytes <= size // 2
    looking.parking.keep_only([])
    assert looking.parking.bytes == looking.parking.tokens == 0


def test_what_is_parked_is_bounded() -> None:
    store, rng = AheadStore(10**6), random.Random(0)
    looking = engine(store, PLAIN, kv_tokens=140)
    began: set[int] = set()
    for _ in range(30):
        looking.look_ahead(rng.sample(requests(), len(requests())))
        rounds(looking, 3)
        looking.look_ahead(())
        began |= {seed for seed in (request.seed for request in requests()) if looking.parking.row(seed)}
        assert looking.parking.tokens <= 140
    assert any(looking.parking.row(seed) is None for seed in began)
    looking = engine(store, kv_tokens=140)
    looking.look_ahead(requests())
    while looking.looks_ahead:
        looking.round()
    assert all(store.has_ended(request) for request in requests())


def test_a_request_whose_step_has_come_begins_anew() -> None:
    looking = engine(AheadStore(10**6), PLAIN)
    due, unwanted, other = [request for request in requests() if request.sampling.max_new_tokens == 90][:3]
    looking.look_ahead([due, unwanted])
    rounds(looking, 3)
    looking.look_ahead(())
    assert looking.parking.row(due.seed)
    assert looking.parking.row(unwanted.seed)
    looking.submit([due])
    assert looking.parking.row(due.seed) is None
    looking.look_ahead([other])
    assert looking.parking.row(unwanted.seed) is None, "nobody asks for it any more"


def test_a_row_goes_on_with_what_is_left_of_its_older_response() -> None:
    request, known = requests()[2], expected()[2]
    store = AheadStore(10**6)
    store.put([ahead(request, known.token_ids, ended=False)])
    looking = engine(store)
    looking.look_ahead([request])
    rounds(looking, 1)
    looking.release()
    looking.look_ahead([request])
    rounds(looking, 1)
    assert looking.rows[0].tokens == list(known.token_ids[:34]), "two passes of 16 tokens and the bonus token"
