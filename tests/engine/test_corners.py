"""Special cases: values that are not finite next to finite ones, invalid drafters, and rounds that fail."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from small import PROMPTS, VOCAB, Target, build, decode, learned, make_requests, reference
from tiny import qwen3

from tlt.config import EngineConfig
from tlt.draft.drafter import Candidates, Level
from tlt.draft.eagle import EagleLayer, eagle_options
from tlt.draft.features import FeatureView
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.engine import Engine
from tlt.engine.profile import profile
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options
from tlt.types import Prompt, Request, Response, SamplingParams

LONG = SamplingParams(max_new_tokens=12)


def poisoned() -> Target:
    """Return a target whose values after token 4 are not finite."""
    target = Target()
    with torch.no_grad():
        target.model.model.embed_tokens.weight[4] = math.nan
    target.decoder.load(target.model.state_dict(), version=0)
    return target


def alone(target: Target, request: Request) -> Response:
    return next(iter(build(target, max_rows=1).generate([request])))


def clean(target: Target, prompt: tuple[int, ...], length: int, seed: int) -> Request:
    """Return a request whose response does not have token 4."""
    while True:
        request = Request(Prompt(seed, "", prompt), 0, 0, seed, SamplingParams(max_new_tokens=length))
        if 4 not in alone(target, request).token_ids:
            return request
        seed += 1


def bad(seed: int) -> Request:
    return Request(Prompt(seed, "", (4, 2, 1, 0, 2, 1, 0, 0, 1, 1)), 0, 0, seed, LONG)


def check(target: Target, got: Iterable[Response], requests: Sequence[Request]) -> None:
    found = {response.request.seed: response.token_ids for response in got}
    for request in requests:
        assert found[request.seed] == alone(target, request).token_ids


def test_a_row_that_moves_leaves_no_values_that_are_not_finite() -> None:
    target = poisoned()
    first, later = clean(target, (1, 2, 3), 3, 100), clean(target, (2, 2), 6, 200)
    check(target, build(target, max_rows=2).generate([first, bad(5), later]), [first, later])


def test_an_abandoned_rollout_leaves_no_values_that_are_not_finite() -> None:
    target = poisoned()
    some = [clean(target, (2, 2), 4, 200), clean(target, (1, 2, 3) * 8, 4, 300)]
    engine = build(target, max_rows=2, prefill_tokens=4)
    engine.start([bad(5), bad(6)])
    engine.round()
    engine.round()
    check(target, list(engine.generate(some)), some)


class Idle:
    """Drafter that gives all tokens the same probability."""

    acceptance_rate = None
    name = "h"

    def begin(self, window: FeatureView | None) -> None:
        self.window: Any = window

    def open(self, request: Request, committed: Sequence[int]) -> None: ...

    def commit(self, row: int, tokens: Sequence[int]) -> None: ...

    def close(self, row: int, last: int) -> None: ...

    def predict(self, level: Level) -> Candidates:
        return Candidates(None, torch.zeros(*level.tokens.shape, VOCAB))


class Wide(Idle):
    """Drafter that returns three nodes at the root's level instead of one."""

    def predict(self, level: Level) -> Candidates:
        B, W = level.tokens.shape
        if level.depth:
            return Candidates(None, torch.full((B, W, VOCAB), -math.inf))
        ids = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 2, 3]]).expand(B, 3, 3)
        log_q = torch.tensor([[90.0, 80, -90], [50, 40, -90], [45, 40, -90]]).expand(B, 3, 3)
        return Candidates(ids, log_q)


def test_a_level_that_is_too_wide_only_turns_the_drafter_off() -> None:
    target, requests = Target(), make_requests(PROMPTS, [LONG], 3)
    engine = build(target, Wide(), Strategy("h", 3, 2, 7))
    responses = decode(engine, requests)
    assert [r.token_ids for r in responses] == [r.token_ids for r in reference(target, requests)]
    assert engine.stats.drafter_failures == 1


class Writes(Idle):
    def predict(self, level: Level) -> Candidates:
        self.window.features[:] = math.nan
        self.window.tokens[:] = 99
        return super().predict(level)


def test_the_window_cannot_be_written_through_its_view() -> None:
    target, harvest = Target(), list[Any]()
    layout = learned(target).options.layout
    shape = Fixed(Strategy("h", 2, 1, 3))
    engine = Engine(target.decoder, EngineConfig(), [Writes()], shape, layout=layout, on_harvest=harvest.append)
    decode(engine, make_requests(PROMPTS, [LONG]))
    assert all(h.features.isfinite().all() and (h.tokens < VOCAB).all() for h in harvest)


@pytest.mark.parametrize("call", [1, 2])
def test_a_rollout_does_not_continue_after_a_failed_round(call: int) -> None:
    """Call 1 is the first prefill, and call 2 another part of it. The rows are active then, and their places are
    empty."""
    target, requests = Target(), make_requests(PROMPTS, [LONG], 3)
    want = {q.seed: r.token_ids for q, r in zip(requests, reference(target, requests), strict=True)}
    engine, forward, calls = build(target, max_rows=4, prefill_tokens=4), target.decoder.forward, [0]

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError("out of memory, say")
        return forward(*args, **kwargs)

    target.decoder.forward = fails
    engine.start(requests)
    with pytest.raises(RuntimeError, match="memory"):
        engine.round()
    with pytest.raises(AssertionError, match="call start"):
        engine.round()
    assert {r.request.seed: r.token_ids for r in engine.generate(requests)} == want


def test_a_response_limit_of_zero_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="token"):
        build(Target(), None, PLAIN).submit([Request(PROMPTS[0], 0, 0, 7, SamplingParams(max_new_tokens=0))])


@pytest.mark.parametrize(
    ("bound", "changes", "settings"),
    [
        (300, {}, {}),
        (320, {}, {}),
        (640, {}, {}),
        (5000, {}, {}),
        (1, {}, {}),
        (1, {"max_position_embeddings": 20}, {"prefill_tokens": 1}),
        (5000, {"max_position_embeddings": 3}, {}),
        (5000, {"max_position_embeddings": 9}, {"max_rows": 1}),
        (5000, {"max_position_embeddings": 161, "vocab_size": 5}, {"prefill_tokens": 1, "max_rows": 1}),
        (5000, {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, {}),
    ],
)
def test_the_profile_fits_into_a_small_cache_and_a_short_model(
    bound: int, changes: dict[str, Any], settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows grow from round to round. A pass beyond the cache would be an IndexError of the ledger, and a position
    beyond the model's limit an IndexError of the rotary table."""
    monkeypatch.setattr("tlt.engine.profile.Engine", partial(Engine, kv_tokens=bound))
    model = qwen3(**{"vocab_size": 99} | changes)
    target = Decoder(decoder_options(model.config), torch.float64, torch.device("cpu"))
    target.load(model.state_dict(), version=0)
    layer = EagleLayer(eagle_options(target.options, "eagle1", 8))
    drafters = [SuffixDrafter(target.options.vocab_size), EagleDrafter(layer, target)]
    arms = [PLAIN, Strategy("suffix", 3, 1, 4), Strategy("eagle", 8, 2, 12)]
    costs = profile(target, EngineConfig(**{"max_rows": 16} | settings), drafters, arms, layer.options.layout)
    assert all(0 < seconds < math.inf for by_arm in costs.values() for seconds in by_arm.values())
