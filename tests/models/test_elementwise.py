"""Bits of elementwise functions, with several threads and numbers of rows against one thread and one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.models.elementwise import by_rows, by_vectors


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


def test_pytorch_alone_cuts_inside_rows() -> None:
    equal = []
    for rows in range(2000, 2050):
        x = values(rows, 96, dtype=torch.float32)
        torch.set_num_threads(1)
        alone = F.silu(x)
        torch.set_num_threads(5)
        equal.append(torch.equal(F.silu(x), alone))
    assert not all(equal), "if PyTorch no longer does this, `by_rows` can go"


def test_gradients_go_through() -> None:
    x = values(701, 96, dtype=torch.float32).requires_grad_()
    torch.set_num_threads(3)
    (ours,) = torch.autograd.grad(by_rows(F.silu, x).sum(), x)
    (theirs,) = torch.autograd.grad(F.silu(x).sum(), x)
    assert torch.allclose(ours, theirs)
