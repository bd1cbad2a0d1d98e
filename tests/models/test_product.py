"""Products against torch's own in float64, and bits of products and elementwise functions for each number of rows and
threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.models import product
from tlt.models.product import Product, by_rows, by_vectors

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
packed_or_not = pytest.mark.parametrize("packed", [False, True])
shared_or_not = pytest.mark.parametrize("shared", [False, True])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def skip_unless_packed(weight: Tensor, packed: bool, patch: pytest.MonkeyPatch) -> None:
    if packed and not Product(weight).packed:
        pytest.skip("this build of torch does not pack this weight")
    if not packed:
        patch.setattr(product, "_can_pack", lambda weight: False)


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    total = x.double() @ weight.double().T
    return total + (0 if bias is None else bias.double()) + (0 if residual is None else residual.double())


def check(x: Tensor, made: Product, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> None:
    given = [tensor.clone() for tensor in (x, residual) if tensor is not None]
    found = made(x, residual)
    assert (found.shape, found.dtype) == ((len(x), len(weight)), x.dtype)
    torch.testing.assert_close(found.double(), expected(x, weight, bias, residual), rtol=1e-5, atol=1e-4)
    assert all(torch.equal(*pair) for pair in zip(given, [t for t in (x, residual) if t is not None], strict=True))


@packed_or_not
@shared_or_not
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (61, 37), (960, 576)])
def test_every_number_of_rows_with_and_without_bias_and_residual(
    monkeypatch: pytest.MonkeyPatch, packed: bool, shared: bool, outputs: int, inputs: int
) -> None:
    weight = torch.randn(outputs, inputs)
    skip_unless_packed(weight, packed, monkeypatch)
    for bias in (None, torch.randn(outputs)):
        made = Product(weight, bias, shared)
        assert torch.equal(made.weight, weight)
        for rows in (0, 1, 2, 3, 4, 17, 300):
            check(torch.randn(rows, inputs), made, weight, bias)
            check(torch.randn(rows, inputs), made, weight, bias, torch.randn(rows, outputs))


@packed_or_not
def test_inputs_weights_and_residuals_need_not_be_contiguous(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    skip_unless_packed(torch.randn(48, 40), packed, monkeypatch)
    for rows, stored in itertools.product((1, 5), (torch.randn(48, 40).T, torch.randn(40, 96)[:, ::2])):
        made = Product(stored)
        check(torch.randn(rows, 100)[:, 30:78], made, stored, None, torch.randn(40, rows).T)
        check(torch.randn(48, rows).T, made, stored, None, torch.randn(rows, 50)[:, 5:45])


@packed_or_not
def test_large_inputs_do_not_overflow_and_one_that_is_not_finite_stays_in_its_row(
    monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    weight = torch.randn(70, 33)
    skip_unless_packed(weight, packed, monkeypatch)
    made, x = Product(weight), torch.randn(6, 33) * 1e30
    torch.testing.assert_close(made(x).double(), expected(x, weight, None, None), rtol=1e-5, atol=1e26)
    x[2, 5], x[4, 32] = torch.nan, torch.inf
    assert made(x).isfinite().all(-1).tolist() == [True, True, False, True, False, True]
    assert not made(x[2:3]).isfinite().any()


@each_dtype
@shared_or_not
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        (48, 32),
        (960, 576),
        (576, 1536),
        (1024, 128),
        (64, 2095),
        *((outputs, 300) for outputs in (1, 2, 3, 5, 7, 8, 9, 17)),
    ],
)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    dtype: torch.dtype, shared: bool, outputs: int, inputs: int
) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    x, residual = torch.randn(700, inputs).to(dtype), torch.randn(700, outputs).to(dtype)
    for made, more in ((Product(weight, None, shared), None), (Product(weight, bias, shared), residual)):
        wanted = made(x, more)
        for rows in (*range(1, 10), 15, 31, 33, 64, 129, 300):
            low = 700 - rows if rows % 2 else 7
            high = low + rows
            assert torch.equal(made(x[low:high], None if more is None else more[low:high]), wanted[low:high]), rows


@shared_or_not
def test_bfloat16_with_the_kernel_of_this_machine(shared: bool) -> None:
    weight, bias = torch.randn(960, 576).bfloat16(), torch.randn(960).bfloat16()
    made = Product(weight, bias, shared)
    for rows in (1, 5):
        x, residual = torch.randn(rows, 576).bfloat16(), torch.randn(rows, 960).bfloat16()
        wanted = expected(x, weight, bias, residual)
        torch.testing.assert_close(made(x, residual).double(), wanted, rtol=0.02, atol=0.2)


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def values(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize(
    ("rows", "size"),
    [(1, 96), (171, 96), (505, 96), (343, 96), (700, 96), (701, 96), (2041, 96), (91, 1536), (7, 40_000)],
)
@pytest.mark.parametrize("function", [F.silu, torch.sigmoid, partial(F.gelu, approximate="tanh")])
def test_a_row_has_the_same_bits_alone_on_one_thread(
    function: Callable[[Tensor], Tensor], rows: int, size: int, threads: int
) -> None:
    x = values(rows, size, dtype=torch.float32)
    torch.set_num_threads(1)
    alone = torch.cat([function(row) for row in x.split(1)])
    torch.set_num_threads(threads)
    assert torch.equal(by_rows(function, x), alone)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("rows", "size"), [(3, 1), (700, 1), (67, 4), (33, 80), (9001, 4), (701, 100), (5, 128)])
@pytest.mark.parametrize("function", [torch.sigmoid, F.softplus, F.silu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_of_any_size_has_the_same_bits_alone(
    dtype: torch.dtype, function: Callable[[Tensor], Tensor], rows: int, size: int, threads: int
) -> None:
    x = values(1, rows, size, dtype=dtype)
    torch.set_num_threads(1)
    alone = torch.cat([by_vectors(function, row) for row in x.split(1, dim=1)], dim=1)
    torch.set_num_threads(threads)
    assert torch.equal(by_vectors(function, x), alone)
    assert torch.allclose(alone, function(x), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 349, 1021])
def test_complex_factors_are_cut_by_rows_too(rows: int) -> None:
    pairs, factors = (torch.view_as_complex(values(rows, n, 48, 2, dtype=torch.float32)) for n in (6, 1))
    torch.set_num_threads(1)
    alone = torch.cat([x * factor for x, factor in zip(pairs.split(1), factors.split(1), strict=True)])
    torch.set_num_threads(3)
    assert torch.equal(by_rows(torch.mul, pairs, factors), alone)


def test_gradients_go_through() -> None:
    x = values(701, 96, dtype=torch.float32).requires_grad_()
    torch.set_num_threads(3)
    (ours,) = torch.autograd.grad(by_rows(F.silu, x).sum(), x)
    (theirs,) = torch.autograd.grad(F.silu(x).sum(), x)
    assert torch.allclose(ours, theirs)
