"""Look-ahead in the engine: the tokens do not depend on the store, right tokens are all accepted, and rows of coming
steps are decoded next to those of the present step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import small
from small import VOCAB, Reference, Target, by_seed, check_tokens, decode, finish, learned, make_requests, reference
from twin import make_model

from tlt.config import EngineConfig
from tlt.draft.ahead import Ahead, AheadStore
from tlt.draft.chains import Draft
from tlt.draft.eagle import eagle_options
from tlt.draft.features import Harvest
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine import drafters, noise_window
from tlt.engine.engine import Engine, Round
from tlt.engine.tuner import Fixed
from tlt.types import Prompt, Request, Response, SamplingParams

SAMPLINGS = [SamplingParams(max_new_tokens=n, stop_token_ids=stops) for n, stops in ((7, (3,)), (40, ()), (90, ()))]
AHEAD = PLAIN._replace(ahead=16)
MIXED = Strategy("eagle", 4, ahead=16)


@cache
def target() -> Target:
    return Target(seed=3)


@cache
def requests() -> tuple[Request, ...]:
    prompts = [Prompt(i, "", tuple(1 + (i * 7 + k) % (VOCAB - 1) for k in range(3 + i))) for i in range(4)]
    return tuple(make_requests(prompts, SAMPLINGS, group=3))


@cache
def expected() -> tuple[Reference, ...]:
    return tuple(reference(target(), requests()))


def engine(store: AheadStore, strategy: Strategy = AHEAD, max_rows: int = 64, kv_tokens: int | None = None) -> Engine:
    drafter = learned(target()) if strategy.drafter == "eagle" else None
    layout = drafter.options.layout if drafter else None
    drafters = [drafter] if drafter else []
    config = EngineConfig(max_rows=max_rows)
    made = Engine(target().decoder, config, drafters, Fixed(strategy), layout=layout, store=store, kv_tokens=kv_tokens)
    return small.with_slots_of_any_size(made) if kv_tokens else made


def ahead(request: Request, tokens: Sequence[int], ended: bool = True) -> Ahead:
    return Ahead(request.seed, request.prompt.token_ids, np.array(tokens, dtype=np.int32), -1, ended)


def filled(spoil: random.Random | None = None) -> AheadStore:
    """Return a store with the reference's tokens, all of them corrupted if asked for."""
    store = AheadStore(10**6)
    answers = [list(known.token_ids) for known in expected()]
    for place, (request, tokens) in enumerate(zip(requests(), answers, strict=True)):
        store.put([ahead(request, _spoiled(tokens, answers[place - 1], spoil) if spoil else tokens)])
    return store


def _spoiled(tokens: list[int], other: list[int], rng: random.Random) -> list[int]:
    cut = rng.randrange(len(tokens) + 1)
    return rng.choice(
        [
            tokens[:cut],  # truncated
            tokens[:cut] + tokens[cut + 1 :],  # one left out
            [*tokens[:cut], rng.randrange(VOCAB), *tokens[cut:]],  # one put in
            tokens + tokens,  # on beyond its end
            other,  # of another seed, and now and then of another prompt
            [rng.randrange(VOCAB) for _ in tokens],
            rng.choice([[*tokens, VOCAB], [-1]]),  # not tokens
            [],
        ]
    )


@pytest.mark.parametrize("kv_tokens", [None, 200], ids=["roomy", "preempted"])
def test_all_look_ahead_tokens_of_the_same_target_are_accepted(kv_tokens: int | None) -> None:
    """Without an update in between, no token is wrong. A row that returns is drafted from its present place."""
    looking = engine(filled(), kv_tokens=kv_tokens)
    check_tokens(decode(looking, requests()), expected())
    stats = looking.stats
    assert stats.seen_ahead == stats.drafted == stats.accepted > 0
    assert (stats.preemptions > 0) == (kv_tokens is not None)
    assert stats.tokens == sum(len(known.token_ids) for known in expected())
    if kv_tokens is None:
        passes = sum(-(-len(known.token_ids) // 17) for known in expected())
        assert stats.row_passes == passes, "16 tokens and the bonus token a pass"


def test_the_end_of_a_response_is_no_rejection_for_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    looking, counts = engine(filled()), list[tuple[int, int]]()
    monkeypatch.setattr(
        looking.tuner, "record", lambda result: counts.extend(zip(result.tokens, result.ahead, strict=True))
    )
    decode(looking, requests())
    assert all(tokens == ahead + 1 for tokens, ahead in counts)
    assert sum(tokens for tokens, _ in counts) > looking.stats.tokens, "some end by a token that was drafted"


@pytest.mark.parametrize("strategy", [AHEAD, MIXED], ids=lambda s: s.name)
@pytest.mark.parametrize("seed", range(2))
def test_tokens_do_not_depend_on_the_store(strategy: Strategy, seed: int) -> None:
    rng = random.Random(seed)
    looking = engine(filled(rng), strategy, max_rows=rng.choice([1, 3, 64]), kv_tokens=rng.choice([None, 400]))
    check_tokens(decode(looking, requests()), expected())
    assert 0 < looking.stats.seen_ahead < looking.stats.tokens


def test_rows_without_look_ahead_drafts_use_the_drafter() -> None:
    store = filled()
    store.forget(request.seed for request in requests()[::2])
    looking = engine(store, MIXED)
    check_tokens(decode(looking, requests()), expected())
    own = [len(known.token_ids) for known in expected()[1::2]]
    assert looking.stats.ahead_passes == sum(-(-length // 17) - (length % 17 == 1) for length in own)
    assert looking.stats.drafted > looking.stats.seen_ahead
    assert looking.drafters.acceptance_rates["eagle"].last, "it drafted for the others"


@pytest.mark.parametrize("strategy", [AHEAD, MIXED], ids=lambda s: s.name)
def test_a_chain_ends_where_the_response_must(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AheadStore(10**6)
    store.put(ahead(r, [*known.token_ids, *[1] * 99]) for r, known in zip(requests(), expected(), strict=True))
    looking = engine(store, strategy)
    drafted = looking.draft

    def checked(now: Round) -> list[Draft]:
        drafts = drafted(now)
        assert all(len(draft.tokens) < row.room for row, draft in zip(now.rows, drafts, strict=True))
        return drafts

    monkeypatch.setattr(looking, "draft", checked)
    check_tokens(decode(looking, requests()), expected())
    assert looking.stats.seen_ahead > 0


def test_a_short_noise_window_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_window, "_WINDOW_BYTES", 10_000)
    looking = engine(filled())
    assert looking.rollout.noise.width < AHEAD.ahead
    check_tokens(decode(looking, requests()), expected())


def kept(store: AheadStore, request: Request) -> tuple[list[int], bool]:
    """Return the tokens of a request in the store, and whether its response had ended."""
    found = store.get(request)
    return ([], False) if found is None else (found.tokens.tolist(), found.ended)


def whole(place: int) -> tuple[list[int], bool]:
    return list(expected()[place].token_ids), True


def decode_ahead(engine: Engine) -> None:
    """Decode all rows of coming steps to their end."""
    while engine.looks_ahead:
        assert not engine.busy
        assert engine.round() == []
        assert len({row.request.seed for row in engine.rows}) == len(engine.rows)


def test_rows_of_coming_steps_end_only_in_the_store() -> None:
    now, coming = requests()[:6], requests()[6:]
    store = AheadStore(10**6)
    looking = engine(store, max_rows=4)
    looking.start(now)
    looking.look_ahead(coming)
    responses: list[Response] = []
    while looking.busy or looking.looks_ahead:
        was_busy = looking.busy
        responses += looking.round()
        live = [row.ahead for row in looking.rows]
        assert not (looking.waiting and any(live)), "nobody waits for them"
        assert was_busy or all(live)
    assert {response.request.seed for response in responses} == {request.seed for request in now}
    assert [kept(store, request) for request in coming] == [whole(place) for place in range(6, 12)]
    assert looking.stats.tokens == sum(len(r.token_ids) for r in responses)
    assert looking.stats.ahead_tokens == sum(len(known.token_ids) for known in expected()[6:])
    check_tokens(decode(engine(store), coming), expected()[6:])


@pytest.mark.parametrize("seed", range(6))
def test_decoding_ahead_in_any_order_of_events(seed: int) -> None:
    """Requests arrive and leave, caches are small, and look-ahead is stopped and continued. The tokens do not
    change."""
    rng = random.Random(seed)
    store = AheadStore(rng.choice([100, 10**6]))
    looking = engine(
        store, rng.choice([AHEAD, MIXED, PLAIN]), max_rows=rng.choice([2, 5]), kv_tokens=rng.choice([None, 400])
    )
    responses: list[Response] = []
    for part in (requests()[:4], requests()[4:8], requests()[8:]):
        looking.start(())
        line = list(part)
        while line or looking.busy or (looking.looks_ahead and rng.random() < 0.9):
            event = rng.random()
            if line and event < 0.3:
                looking.submit([line.pop()])
            elif event < 0.4:
                looking.look_ahead(rng.sample([r for r in requests() if r not in part], rng.randrange(5)))
            elif event < 0.45:
                looking.keep_ahead()
            elif event < 0.5:
                live = [row.request.seed for row in (*looking.rows, *looking.waiting) if not row.ahead]
                looking.submit((), looking.release_requests(live[:1]))
            elif looking.busy or looking.looks_ahead:
                responses += looking.round()
    done = {response.request.seed: response for response in responses}
    check_tokens([done[request.seed] for request in requests()], expected())


def test_look_ahead_continues_an_unfinished_draft_of_an_older_target() -> None:
    place, known = max(enumerate(expected()), key=lambda pair: len(pair[1].token_ids))
    tokens = list(known.token_ids)
    tokens[2] = (tokens[2] + 1) % VOCAB  # the older target chose another token here
    store = AheadStore(10**6)
    store.put([ahead(requests()[place], tokens[:5], ended=False)])
    looking = engine(store, PLAIN)
    looking.look_ahead([requests()[place]])
    looking.round()
    assert [row.tokens[:5] for row in looking.rows] == [tokens[:5]], "nothing is decoded again"
    assert looking.stats.ahead_tokens == 1
    looking.release()
    assert not looking.looks_ahead
    assert kept(store, requests()[place])[0][:5] == tokens[:5]
    decode_ahead(looking)
    check_tokens(decode(engine(store), [requests()[place]]), [known])


def test_look_ahead_rows_are_preempted_by_submitted_requests() -> None:
    store = AheadStore(10**6)
    looking = engine(store, PLAIN, max_rows=3)
    looking.look_ahead(requests()[:5])
    for _ in range(2):
        looking.round()
    assert all(row.ahead for row in looking.rows)
    looking.submit(requests()[5:8])
    responses = looking.round()
    assert [row.ahead for row in looking.rows] == [False] * 3
    for place in range(3):
        assert kept(store, requests()[place])[0] == whole(place)[0][:2], "what it had is kept"
    responses += finish(looking)
    assert by_seed(responses).keys() == {request.seed for request in requests()[5:8]}
    decode_ahead(looking)
    assert [kept(store, requests()[place]) for place in range(5)] == [whole(place) for place in range(5)]


def test_look_ahead_rows_are_preempted_by_a_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round is then not timed, because the tuner chose for more rows."""
    made = engine(AheadStore(10**6))
    monkeypatch.setattr(made.tuner, "free_rows", lambda rows: 2)
    made.start(requests()[2:3])
    made.look_ahead(requests()[5:6])
    for _ in range(2):
        made.round()
    assert [row.ahead for row in made.rows] == [False, True]
    answers, reserve = iter([False]), made.rollout.scheduler.reserve
    monkeypatch.setattr(made.rollout.scheduler, "reserve", lambda new: next(answers, True) and reserve(new))
    assert made.make_room(AHEAD)
    assert [row.ahead for row in made.rows] == [False]
    assert made.stats.preemptions == 0


def test_repeated_look_ahead_requests_continue_and_others_leave() -> None:
    store = AheadStore(10**6)
    looking = engine(store, PLAIN)
    looking.look_ahead(requests()[:4])
    for _ in range(3):
        looking.round()
    continued = [row.request.seed for row in looking.rows if row.request in requests()[1:4]]
    looking.look_ahead(requests()[1:6])
    assert sorted(row.request.seed for row in looking.rows) == sorted(continued)
    dropped, _ = kept(store, requests()[0])
    assert dropped == whole(0)[0][:3]
    decode_ahead(looking)
    assert [kept(store, requests()[place]) for place in range(1, 6)] == [whole(place) for place in range(1, 6)]
    assert looking.stats.ahead_tokens == sum(len(whole(place)[0]) for place in range(1, 6)) + len(dropped)


class Brief(Fixed):
    """Tuner whose brief rounds have three rows."""

    def brief_rows(self) -> int:
        return 3


def test_urgent_look_ahead_requests_replace_less_urgent_ones() -> None:
    store = AheadStore(10**6)
    looking = Engine(target().decoder, EngineConfig(max_rows=8), (), Brief(PLAIN), store=store)
    places = [i for i, known in enumerate(expected()) if len(known.token_ids) > 7][:6]
    *given, late = (requests()[i] for i in places)
    looking.look_ahead(given)
    for _ in range(4):
        looking.round()
    looking.look_ahead([late, *given])
    assert {row.request.seed for row in looking.rows} == {request.seed for request in given[:2]}, "the third leaves"
    looking.round()
    assert {row.request.seed for row in looking.rows} == {request.seed for request in (late, *given[:2])}
    decode_ahead(looking)
    assert [kept(store, requests()[place]) for place in places] == [whole(place) for place in places]
    tokens = sum(len(whole(place)[0]) for place in places)
    assert looking.stats.ahead_tokens == tokens, "the third goes on from where it stood"


def test_look_ahead_rows_do_not_count_for_this_step_even_if_preempted() -> None:
    store = AheadStore(10**6)
    looking = engine(store, PLAIN, kv_tokens=140)
    looking.look_ahead(requests())
    decode_ahead(looking)
    assert looking.stats.preemptions > 0
    assert looking.stats.seconds["prefill"] == looking.stats.prefill_tokens == 0, "the cluster's forecast uses both"
    assert [kept(store, request) for request in requests()] == [whole(place) for place in range(12)]


def test_a_new_rollout_keeps_look_ahead_tokens_even_after_a_full_cache() -> None:
    store = AheadStore(10**6)
    looking = engine(store, PLAIN, kv_tokens=140)
    looking.look_ahead([request for request in requests() if request.sampling.max_new_tokens > 7])
    while not looking.stats.preemptions:
        looking.round()
    out = [row for row in looking.rollout.scheduler.coming if row.tokens]
    active = [row for row in looking.rows if row.tokens]
    assert out
    assert active
    looking.start(())
    assert not looking.looks_ahead
    assert all(kept(store, row.request)[0] == row.tokens for row in (*out, *active))


def test_a_request_is_not_lost_when_its_look_ahead_row_is_dropped() -> None:
    request, known = requests()[2], expected()[2]
    looking = engine(AheadStore(10**6), PLAIN)
    looking.look_ahead([request])
    looking.round()
    looking.submit([request])
    responses = [response for _ in range(2) for response in looking.round()]
    looking.look_ahead(())
    check_tokens([*responses, *finish(looking)], [known])


class Free(Fixed):
    """Tuner on a device on which `most` rows take as long as one."""

    most = 1

    def free_rows(self, rows: int) -> int:
        return max(rows, self.most)


@pytest.mark.parametrize("most", [1, 3, 64])
def test_free_slots_are_filled_at_the_end_of_a_rollout(most: int) -> None:
    tuner = Free(AHEAD)
    tuner.most = most
    looking = Engine(target().decoder, EngineConfig(max_rows=8), (), tuner, store=AheadStore(10**6))
    looking.start(requests()[:3])
    looking.look_ahead(requests()[3:])
    found: dict[int, list[int]] = {}
    while looking.busy:
        found |= by_seed(looking.round())
        own = sum(not row.ahead for row in looking.rows)
        assert not own or len(looking.rows) <= max(3, min(most, 8))
    assert looking.stats.ahead_tokens == 0 if most == 1 else looking.stats.ahead_tokens > 0
    assert found == {request.seed: whole(place)[0] for place, request in enumerate(requests()[:3])}


def test_look_ahead_tokens_become_training_data_when_their_step_comes() -> None:
    model, found = make_model(seed=1), list[Harvest]()
    layout = eagle_options(model.decoder.options, "eagle3", 32).layout
    store = AheadStore(10_000)
    engine = Engine(model.decoder, EngineConfig(), layout=layout, on_harvest=found.append, store=store)
    coming = [small.request((4, n % 5, 2), 10 * n, 48, temperature=0.7) for n in range(6)]
    engine.start(())
    engine.look_ahead(coming)
    decode_ahead(engine)
    assert found == []
    engine.start(coming)
    finish(engine)
    assert {item.prompt_id for item in found} == set(range(6))


def test_rows_of_this_step_are_no_drafts() -> None:
    """They would push out drafts of coming steps."""
    store = AheadStore(10**6)
    looking = engine(store, PLAIN)
    looking.start(requests()[:3])
    looking.look_ahead(requests()[3:])
    looking.round()
    looking.keep_ahead()
    assert [store.get(request) for request in requests()[:3]] == [None] * 3


def test_tokens_of_the_last_target_are_kept_as_its_own() -> None:
    model = small.Target(seed=3)
    store = AheadStore(10**6)
    looking = Engine(model.decoder, EngineConfig(), store=store)
    looking.look_ahead(requests()[8:9])
    looking.round()
    model.decoder.load(model.model.state_dict(), version=5)
    looking.start(())
    known = store.get(requests()[8])
    assert known
    assert known.version == 0


def test_the_drafter_computes_only_rows_without_look_ahead_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms, chains = list[list[int]](), drafters.draft_chains

    def watched(drafter: Any, roots: Any, *rest: Any) -> list[Draft]:
        rooms.append(roots.room.tolist())
        return chains(drafter, roots, *rest)

    monkeypatch.setattr(drafters, "draft_chains", watched)
    store = filled()
    looking = engine(store, MIXED)
    looking.start(requests()[6:9])
    looking.round()
    assert rooms == [], "all rows have look-ahead drafts"
    store.forget([requests()[7].seed])
    looking.start(requests()[6:9])
    looking.round()
    assert rooms == [[0, 40, 0]]


def test_no_token_after_a_stop_counts_as_accepted() -> None:
    """The old response goes on beyond the stop, and the target agrees with it."""
    place = max(range(12), key=lambda i: len(expected()[i].token_ids))
    tokens = list(expected()[place].token_ids)
    stop = max(set(tokens), key=tokens.index)
    asked = replace(requests()[place], sampling=replace(requests()[place].sampling, stop_token_ids=(stop,)))
    store = AheadStore(10**6)
    store.put([ahead(asked, tokens)])
    looking = engine(store, AHEAD)
    (found,) = decode(looking, [asked])
    assert len(found.token_ids) == tokens.index(stop) + 1
    assert looking.stats.accepted == looking.stats.tokens - looking.stats.row_passes + 1, "the stop was drafted"
