"""Products against torch's own in float64, with packed and with plain weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tlt.models import product
from tlt.models.product import Product

has_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
WAYS = ["plain", pytest.param("both", marks=has_onednn), pytest.param("packed", marks=has_onednn)]
each_way = pytest.mark.parametrize("way", WAYS)
shared_or_not = pytest.mark.parametrize("shared", [False, True])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def force(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(product, "packed_from", lambda *key: {"plain": product.NEVER, "both": 2, "packed": 1}[way])


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    total = x.double() @ weight.double().T
    return total + (0 if bias is None else bias.double()) + (0 if residual is None else residual.double())


def check(x: Tensor, made: Product, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> None:
    given = [tensor.clone() for tensor in (x, residual) if tensor is not None]
    found = made(x, residual)
    assert (found.shape, found.dtype) == ((len(x), len(weight)), x.dtype)
    torch.testing.assert_close(found.double(), expected(x, weight, bias, residual), rtol=1e-5, atol=1e-4)
    assert all(torch.equal(*pair) for pair in zip(given, [t for t in (x, residual) if t is not None], strict=True))


@each_way
@shared_or_not
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (61, 37), (960, 576)])
def test_every_number_of_rows_with_and_without_bias_and_residual(
    monkeypatch: pytest.MonkeyPatch, way: str, shared: bool, outputs: int, inputs: int
) -> None:
    force(monkeypatch, way)
    weight = torch.randn(outputs, inputs)
    for bias in (None, torch.randn(outputs)):
        made = Product(weight, bias, shared)
        for rows in (0, 1, 2, 3, 17, 300):
            check(torch.randn(rows, inputs), made, weight, bias)
            check(torch.randn(rows, inputs), made, weight, bias, torch.randn(rows, outputs))


@each_way
def test_inputs_weights_and_residuals_need_not_be_contiguous(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    force(monkeypatch, way)
    for rows, stored in itertools.product((1, 5), (torch.randn(48, 40).T, torch.randn(40, 96)[:, ::2])):
        made = Product(stored)
        check(torch.randn(rows, 100)[:, 30:78], made, stored, None, torch.randn(40, rows).T)
        check(torch.randn(48, rows).T, made, stored, None, torch.randn(rows, 50)[:, 5:45])


@each_way
def test_large_inputs_do_not_overflow_and_one_that_is_not_finite_stays_in_its_row(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    force(monkeypatch, way)
    weight = torch.randn(70, 33)
    made, x = Product(weight), torch.randn(6, 33) * 1e30
    torch.testing.assert_close(made(x).double(), expected(x, weight, None, None), rtol=1e-5, atol=1e26)
    x[2, 5], x[4, 32] = torch.nan, torch.inf
    assert made(x).isfinite().all(-1).tolist() == [True, True, False, True, False, True]


@shared_or_not
def test_float64_is_never_packed_and_keeps_the_bits_of_torch(shared: bool) -> None:
    weight, bias = torch.randn(3072, 576, dtype=torch.float64), torch.randn(3072, dtype=torch.float64)
    made = Product(weight, bias, shared)
    assert made.packed is None
    kept = weight.T if shared else weight.T.contiguous()
    for rows in (1, 4):
        x, residual = torch.randn(rows, 576, dtype=torch.float64), torch.randn(rows, 3072, dtype=torch.float64)
        assert torch.equal(made(x, residual), torch.addmm(residual + bias, x, kept))
        assert torch.equal(made(x), torch.addmm(bias, x, kept))
        assert torch.equal(Product(weight, None, shared)(x), torch.mm(x, kept))


@shared_or_not
def test_bfloat16_with_the_kernel_of_this_machine(shared: bool) -> None:
    weight, bias = torch.randn(960, 576).bfloat16(), torch.randn(960).bfloat16()
    made = Product(weight, bias, shared)
    for rows in (1, 5):
        x, residual = torch.randn(rows, 576).bfloat16(), torch.randn(rows, 960).bfloat16()
        wanted = expected(x, weight, bias, residual)
        torch.testing.assert_close(made(x, residual).double(), wanted, rtol=0.02, atol=0.2)
