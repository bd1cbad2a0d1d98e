"""The int8 copy of a target, against products with weights and inputs rounded by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from small import Target
from torch import Tensor

from tlt.models import int8
from tlt.models.int8 import Int8Copy, Int8Product, can_quantize
from tlt.models.product import Product
from tlt.verify.oracle import causal_hidden

TOKENS = torch.tensor([[1, 2, 3, 4, 0, 2]])


def rounded_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, with each output's weights rounded to 127ths of their largest, and all of x to 255ths of its
    range."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    step = (high - low) / 255
    zero = round(-low / step)
    whole = ((x / step).round() + zero).clamp(0, 255) - zero
    return (whole * step) @ ((weight / scale).round() * scale).T


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_product_is_that_of_rounded_weights_and_inputs(rows: int) -> None:
    torch.manual_seed(rows)
    weight, x, bias, residual = torch.randn(24, 16), torch.randn(rows, 16), torch.randn(24), torch.randn(rows, 24)
    weight[5], weight[:, 3] = 0.0, weight[:, 3] * 20
    before = residual.clone()
    found = Int8Product(Product(weight, bias))(x, residual)
    torch.testing.assert_close(found, rounded_product(x, weight) + bias + residual, rtol=1e-4, atol=1e-3)
    alone = Int8Product(Product(weight, shared=True))(x)
    torch.testing.assert_close(alone, rounded_product(x, weight), rtol=1e-4, atol=1e-3)
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
    count = len(int8._COPIES)
    del target, other
    assert len(int8._COPIES) == count - 2


def test_new_weights_are_quantized_only_if_that_takes_at_most_half_a_percent_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]

    def product(given: Product) -> Int8Product:
        clock[0] += 1.0
        return Int8Product(given)

    monkeypatch.setattr(int8, "Int8Product", product)
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
    monkeypatch.setattr(int8, "_SHARE", 1e9)
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
