"""The int8 copy of the target: its products, what it accepts as a drafter, and that it cannot spoil the target's cache.
test_losslessness.py compares its tokens with the reference's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import small
import torch
from small import PROMPTS, Target, build, make_requests
from torch import Tensor

from tlt.config import SpeculationConfig
from tlt.draft import quantized
from tlt.draft.drafter import Candidates, Level
from tlt.draft.drafter_folder import DrafterError
from tlt.draft.quantized import Int8Copy, Int8Product, QuantizedDrafter, can_quantize, needs_short_inputs
from tlt.draft.strategy import Strategy
from tlt.engine.drafters import make_drafters
from tlt.engine.engine import Engine
from tlt.engine.own_backend import make_tuner
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.models.product import Product
from tlt.types import SamplingParams
from tlt.verify.oracle import causal_hidden

QUANTIZED = Strategy("quantized", 4)
REQUESTS = make_requests(PROMPTS, [SamplingParams(1.0, max_new_tokens=40)], group=8)


def engine_of(target: Target, drafter: QuantizedDrafter | None = None) -> Engine:
    return build(target, drafter or QuantizedDrafter(target.decoder), QUANTIZED, 16)


@pytest.mark.parametrize(
    "params", [SamplingParams(1.0), SamplingParams(0.3), SamplingParams(1.0, top_k=2)], ids=["plain", "cold", "top-k"]
)
def test_most_draft_tokens_are_accepted_without_any_training(params: SamplingParams) -> None:
    engine = engine_of(Target())
    small.decode(engine, make_requests(PROMPTS, [replace(params, max_new_tokens=40)], group=8))
    assert engine.stats.acceptance_rate["quantized"] > 0.85
    assert min(engine.drafters.calibrations["quantized"].acceptance_rates(QUANTIZED.depth)) > 0.8


def test_each_rollout_drafts_with_its_weights_even_after_weights_that_were_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tlt.draft.quantized._SHARE", 1e9)
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


TOKENS = torch.tensor([[1, 2, 3, 4, 0, 2]])


def rounded_product(x: Tensor, weight: Tensor, levels: int) -> Tensor:
    """Return x @ weight.T, with each output's weights rounded to 127ths of their largest, and all of x to `levels`
    parts of its range."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    step = (high - low) / levels
    zero = round(-low / step)
    whole = ((x / step).round() + zero).clamp(0, levels) - zero
    return (whole * step) @ ((weight / scale).round() * scale).T


@pytest.mark.parametrize(
    ("capabilities", "short"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_vnni": False}, True),
        ({"architecture": "x86_64", "avx512_vnni": True, "amx_int8": False}, False),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_inputs_have_7_bits_where_the_cpu_cuts_sums_off(
    capabilities: dict[str, Any], short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    assert needs_short_inputs() == short


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("short", {True, needs_short_inputs()}, ids=str)  # 8 bits only where the CPU can
def test_a_product_is_that_of_rounded_weights_and_inputs(
    rows: int, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "needs_short_inputs", lambda: short)
    levels = 127 if short else 255
    torch.manual_seed(rows)
    weight, x, bias, residual = torch.randn(24, 16), torch.randn(rows, 16), torch.randn(24), torch.randn(rows, 24)
    weight[5], weight[:, 3] = 0.0, weight[:, 3] * 20
    before = residual.clone()
    found = Int8Product(Product(weight, bias))(x, residual)
    torch.testing.assert_close(found, rounded_product(x, weight, levels) + bias + residual, rtol=1e-4, atol=1e-3)
    alone = Int8Product(Product(weight, shared=True))(x)
    torch.testing.assert_close(alone, rounded_product(x, weight, levels), rtol=1e-4, atol=1e-3)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_copy_is_close_to_the_target_in_each_dtype(dtype: torch.dtype) -> None:
    target = Target(dtype=dtype).decoder
    copy = Int8Copy.of(target).decoder(target)
    hidden = causal_hidden(copy, TOKENS)
    assert hidden.dtype == dtype
    own, exact = copy.logits(hidden).double(), target.logits(causal_hidden(target, TOKENS)).double()
    assert 0 < (own - exact).abs().max() < 0.3 * exact.std()


def test_a_target_has_one_copy_which_ends_with_it() -> None:
    target, other = Target().decoder, Target().decoder
    assert Int8Copy.of(target) is Int8Copy.of(target) is not Int8Copy.of(other)
    count = len(quantized._COPIES)
    del target, other
    assert len(quantized._COPIES) == count - 2


def test_new_weights_are_quantized_only_if_that_takes_at_most_half_a_percent_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]

    def product(given: Product) -> Int8Product:
        clock[0] += 1.0
        return Int8Product(given)

    monkeypatch.setattr(quantized, "Int8Product", product)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    first, second = Target(seed=0), Target(seed=1)
    target, copy = first.decoder, Int8Copy.of(first.decoder)
    own = copy.decoder(target)
    products = clock[0]
    assert products == 4 * len(target.layers) + 1
    old = own.layers[0].qkv
    target.load(second.model.state_dict(), version=1)
    clock[0] += 199 * products
    copy.refresh(target)
    assert copy.decoder(target).layers[0].qkv is old
    assert own.embedding is target.embedding  # so no old ones are kept alive
    assert own.norm is target.norm
    assert own.layers[0].input_norm is target.layers[0].input_norm
    clock[0] += 1.1 * products
    copy.refresh(target)
    fresh = Int8Copy.of(second.decoder).decoder(second.decoder)
    found, expected = (own.logits(causal_hidden(own, TOKENS)) for own in (copy.decoder(target), fresh))
    assert torch.equal(found, expected)
    clock[0] += 1e6
    before = clock[0]
    copy.refresh(target)
    assert clock[0] == before, "the same weights are quantized once"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e39])
def test_weights_that_are_not_finite_leave_the_old_copy(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SHARE", 1e9)
    other, target = Target(), Target().decoder
    other.model.lm_head.weight.data[0, 0] = value
    bad = other.model.state_dict()
    copy = Int8Copy.of(target)
    own = copy.decoder(target)
    product = own.to_logits
    target.load(bad, version=1)
    copy.refresh(target)
    assert own.to_logits is product
    new = Target().decoder
    new.load(bad, version=0)
    with pytest.raises(ArithmeticError, match="not finite"):
        Int8Copy.of(new).decoder(new)


def test_only_the_fused_decoder_on_a_cpu_can_be_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target().decoder
    assert can_quantize(target)
    with monkeypatch.context() as patch:
        patch.setattr("torch.backends.quantized", SimpleNamespace(engine="none"))
        assert not can_quantize(target)
    target.device = torch.device("cuda")
    assert not can_quantize(target)

    class Generic(type(target)):
        pass

    target.device, target.__class__ = torch.device("cpu"), Generic
    assert not can_quantize(target)
