"""Chains that are drafted as a whole and replayed, as on a CUDA device, equal chains that grow token by token."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle

import pytest
import small
import torch
from fake_graph import fake_graphs
from twin import Model, make_layer, make_model

from tlt.config import EngineConfig
from tlt.draft.chains import Draft
from tlt.draft.eagle import EagleLayer, Kind, eagle_options
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.engine import Engine, Round
from tlt.engine.tuner import Fixed
from tlt.types import Prompt, Request, SamplingParams
from tlt.verify.modes import InTurn

WINDOW = 6  # shorter than the rows, so the ring of the drafter's cache wraps around
SAMPLINGS = {
    "plain": [SamplingParams(max_new_tokens=40, stop_token_ids=(3,))],
    "long": [SamplingParams(max_new_tokens=60)],
    "tempered": [SamplingParams(0.7, max_new_tokens=40), SamplingParams(1.3, max_new_tokens=9)],
    "greedy": [SamplingParams(0.0, max_new_tokens=30), SamplingParams(1.0, max_new_tokens=22)],
    "restricted": [SamplingParams(0.9, top_k=4, max_new_tokens=25), SamplingParams(1.0, top_p=0.8, max_new_tokens=40)],
}


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


def layer_of(model: Model, kind: Kind, reduced: bool) -> EagleLayer:
    layer = make_layer(model.decoder, kind, WINDOW)
    if not reduced:
        return layer
    options = replace(eagle_options(model.decoder.options, kind, WINDOW), draft_vocab_size=7)
    small = EagleLayer(options).double()
    small.load_state_dict(layer.state_dict() | {"vocabulary": torch.tensor([0, 1, 3, 4, 6, 8, 10])})
    return small


def drafts(
    model: Model,
    layer: EagleLayer,
    whole: bool,
    strategies: list[Strategy],
    sampling: str,
    kv_tokens: int | None = None,
) -> list[tuple[int, int, Draft]]:
    """Return the drafts of 11 requests that are decoded in 5 rows."""
    drafter = EagleDrafter(layer, model.decoder)
    drafter.whole_chains = whole
    layout = layer.options.layout
    tuner = InTurn(strategies)
    engine = Engine(model.decoder, EngineConfig(max_rows=5), [drafter], tuner, layout=layout, kv_tokens=kv_tokens)
    if kv_tokens:
        small.with_slots_of_any_size(engine)
    params = cycle(SAMPLINGS[sampling])
    texts = [tuple((3 * n + j * j) % 11 for j in range(1 + 5 * (n % 4))) for n in range(11)]
    asked = [Request(Prompt(n, "", text), 0, 0, 70 + n, next(params)) for n, text in enumerate(texts)]
    with fake_graphs() if whole else nullcontext([]) as captured:
        found = observed_drafts(engine, asked)
    assert whole == bool(captured)
    assert engine.stats.drafter_failures == 0
    assert engine.stats.preemptions > 0 or kv_tokens is None
    assert whole == bool(drafter.chains)
    buffers = {chain.noise.data_ptr() for chain in drafter.chains.values()}
    assert len(buffers) == len({(chain.shape.rows, chain.shape.depth) for chain in drafter.chains.values()})
    return found


EVERY_ROUND = [Strategy("eagle", 4)]
NOW_AND_THEN = [PLAIN, PLAIN, Strategy("eagle", 3), PLAIN, Strategy("eagle", 2)]
CASES: dict[str, tuple[Kind, bool, list[Strategy], str, int | None]] = {
    "every round": ("eagle3", False, EVERY_ROUND, "plain", None),
    "eagle1": ("eagle1", False, EVERY_ROUND, "plain", None),
    "some tokens": ("eagle3", True, EVERY_ROUND, "plain", None),
    "one token": ("eagle1", True, [Strategy("eagle", 1)], "plain", None),
    "unlikely ones are left out": ("eagle1", True, [Strategy("eagle", 5, 0.3)], "plain", None),
    "now and then": ("eagle3", False, NOW_AND_THEN, "plain", None),
    "preempted": ("eagle3", False, EVERY_ROUND, "long", 180),
    **{name: ("eagle1", True, EVERY_ROUND, name, None) for name in ("tempered", "greedy", "restricted")},
}


@pytest.mark.parametrize("case", CASES)
def test_whole_chains_equal_those_grown_by_token(model: Model, case: str) -> None:
    kind, reduced, strategies, sampling, kv_tokens = CASES[case]
    layer = layer_of(model, kind, reduced)
    ours, theirs = (drafts(model, layer, whole, strategies, sampling, kv_tokens) for whole in (True, False))
    assert len(ours) > 20
    for whole, by_token in zip(ours, theirs, strict=True):
        assert whole == by_token


# -- rollouts and new weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_chains_survive_rollouts_and_new_weights(kind: Kind, reduced: bool) -> None:
    """The drafts are those of a new drafter that grows its chains token by token."""
    first, second = make_model(seed=0), make_model(seed=1)
    layer = layer_of(first, kind, reduced)
    found = []
    for whole in (True, False):
        decoder = make_model(seed=0).decoder
        drafter = EagleDrafter(layer, decoder)
        drafter.whole_chains = whole
        tuner, layout = Fixed(Strategy("eagle", 3)), layer.options.layout
        engine = Engine(decoder, EngineConfig(max_rows=2), [drafter], tuner, layout=layout)
        with fake_graphs() if whole else nullcontext([]):
            list(engine.generate(two_requests()))
            made = {shape: chain.replayed.graph for shape, chain in drafter.chains.items()}
            decoder.load(second.hf.state_dict(), version=1)
            found.append(observed_drafts(engine, two_requests()))
            assert engine.stats.drafter_failures == 0
            kept = {shape: chain.replayed.graph for shape, chain in drafter.chains.items() if made.get(shape)}
            assert {shape: graph for shape, graph in made.items() if graph} == kept
            assert whole == bool(kept)
    assert found[0] == found[1]


def two_requests() -> list[Request]:
    return [Request(Prompt(n, "", (1 + n, 2)), 0, 0, 70 + n, SamplingParams(max_new_tokens=30)) for n in range(2)]


def observed_drafts(engine: Engine, asked: list[Request]) -> list[tuple[int, int, Draft]]:
    """Decode the requests. Return (seed, tokens of the row, draft) of every row and round that drafts."""
    found: list[tuple[int, int, Draft]] = []
    draft = engine.draft

    def observed(now: Round) -> list[Draft]:
        made = draft(now)
        if now.strategy != PLAIN:
            rows = zip(now.rows, made, strict=True)
            found.extend((row.request.seed, len(row.tokens), each) for row, each in rows)
        return made

    engine.draft = observed
    assert len(list(engine.generate(asked))) == len(asked)
    assert any(draft.tokens for *_, draft in found)
    return found


def test_chains_are_captured_again_if_the_memory_of_the_drafter_has_changed(model: Model) -> None:
    """They are freed without the garbage collector, because a collection during a capture would make it fail."""
    layer = layer_of(model, "eagle1", False)
    drafter = EagleDrafter(layer, model.decoder)
    drafter.whole_chains = True
    engine = Engine(model.decoder, EngineConfig(), [drafter], Fixed(Strategy("eagle", 3)), layout=layer.options.layout)
    with fake_graphs():
        list(engine.generate(two_requests()))
        chains = [weakref.ref(chain.replayed) for chain in drafter.chains.values()]
        assert chains
        drafter.attention.resize(32, drafter.window.capacity)
        gc.disable()
        try:
            list(engine.generate(two_requests()))
            assert all(chain() is None for chain in chains)
        finally:
            gc.enable()
