"""The int8 copy of the target as a drafter: what it accepts, and that it cannot spoil the target's cache.
test_losslessness.py compares its tokens with the reference's."""

from __future__ import annotations

import pytest
import small
import torch
from small import PROMPTS, Target, build, make_requests

from tlt.config import SpeculationConfig
from tlt.draft.drafter import Candidates, Level
from tlt.draft.drafter_folder import DrafterError
from tlt.draft.quantized import QuantizedDrafter
from tlt.draft.strategy import Strategy
from tlt.engine.drafters import make_drafters
from tlt.engine.engine import Engine
from tlt.engine.own_backend import make_tuner
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.types import SamplingParams

QUANTIZED = Strategy("quantized", 4)
REQUESTS = make_requests(PROMPTS, [SamplingParams(1.0, max_new_tokens=40)], group=8)


def engine_of(target: Target, drafter: QuantizedDrafter | None = None) -> Engine:
    return build(target, drafter or QuantizedDrafter(target.decoder), QUANTIZED, 16)


def test_most_draft_tokens_are_accepted_without_any_training() -> None:
    engine = engine_of(Target())
    small.decode(engine, REQUESTS)
    assert engine.stats.acceptance_rate["quantized"] > 0.85
    assert min(engine.drafters.calibrations["quantized"].acceptance_rates(QUANTIZED.depth)) > 0.8


def test_each_rollout_drafts_with_its_weights_even_after_weights_that_were_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tlt.models.int8._SHARE", 1e9)
    target, broken, other = Target(), Target(), Target(seed=1)
    broken.model.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    engine = engine_of(target)
    small.decode(engine, REQUESTS)
    for version, of in enumerate((broken, other), start=1):
        target.decoder.load(of.model.state_dict(), version)
        responses = small.decode(engine, REQUESTS)
    small.check_tokens(responses, small.reference(other, REQUESTS))
    assert "quantized" in engine.drafters.usable
    assert engine.stats.acceptance_rate["quantized"] > 0.85


def test_the_weights_are_not_quantized_before_the_first_draft() -> None:
    target = Target()
    drafter = QuantizedDrafter(target.decoder)
    drafter.begin(None)
    assert not drafter.copy._copy.layers


def test_a_drafter_that_enters_between_two_rounds_can_draft() -> None:
    target = Target()
    engine = engine_of(target)
    engine.start(REQUESTS)
    engine.round()
    engine.swap(QuantizedDrafter(target.decoder))
    small.finish(engine)
    assert engine.stats.drafter_failures == 0


class Spoiled(QuantizedDrafter):
    """Drafter that computes values that are not finite, from its 6th level on: those of the qkv product, which are
    stored, or the hidden states."""

    def __init__(self, target: Decoder, stored: bool) -> None:
        super().__init__(target)
        self.levels, self.stored = 0, stored

    def predict(self, level: Level) -> Candidates:
        self.levels += 1
        if self.levels < 6:
            return super().predict(level)
        whole = self.copy.decoder(self.target)
        owner, name = (whole.layers[-1], "qkv") if self.stored else (whole, "norm")
        right = getattr(owner, name)
        setattr(owner, name, lambda *given: torch.full_like(right(*given), torch.nan))
        try:
            return super().predict(level)
        finally:
            setattr(owner, name, right)


@pytest.mark.parametrize("stored", [False, True])
def test_a_copy_that_fails_is_dropped_and_leaves_no_trace_in_the_cache(stored: bool) -> None:
    target = Target()
    engine = engine_of(target, Spoiled(target.decoder, stored))

    def check(engine: Engine) -> None:
        assert all(torch.isfinite(memory).all() for memory in engine.cache.store.memory)

    small.check_tokens(small.decode(engine, REQUESTS, after_round=check), small.reference(target, REQUESTS))
    assert engine.stats.drafter_failures == 1


def test_a_response_can_reach_the_last_position_of_the_model() -> None:
    target = Target()
    longest = target.decoder.options.max_positions
    requests = [  # one nears the end before the other, which drafts on
        small.request(tokens, i, longest - len(tokens)) for i, tokens in enumerate(((1, 2, 3), (4,) * (longest - 3)))
    ]
    engine = build(target, QuantizedDrafter(target.decoder), Strategy("quantized", 8))
    assert small.by_seed(build(target).generate(requests)) == small.by_seed(engine.generate(requests))
    assert engine.stats.drafter_failures == 0


def test_where_it_does_not_work_it_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target().decoder

    def named(drafter: str) -> list[str]:
        return [made.name for made in make_drafters(SpeculationConfig(drafter=drafter), target)[0]]

    assert named("adaptive") == ["quantized", "suffix"]
    assert named("quantized") == ["quantized"]
    monkeypatch.setattr("tlt.draft.quantized.can_quantize", lambda target: False)
    assert named("adaptive") == ["suffix"]
    with pytest.raises(DrafterError, match="needs a CPU"):
        named("quantized")


def test_a_recipe_sets_the_largest_number_of_draft_tokens() -> None:
    tuner = make_tuner(SpeculationConfig(drafter="quantized", depth=3), Target().decoder, ())
    assert isinstance(tuner, Fixed)
    assert tuner.strategies == (Strategy("quantized", 3, 0.3),)
