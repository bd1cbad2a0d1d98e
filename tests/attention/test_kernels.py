"""Attention in Triton, against a plain implementation in float64, and its bits in passes of all shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton_interpreter import (
    compiles,
    in_the_interpreter,
    not_in_the_interpreter,
    products_as_on_a_gpu,
    run_in_the_interpreter,
)

pytest.importorskip("triton")
LENGTHS = (0, -1, 15, 70)
"""committed positions of the rows; -1: padding"""
TOKENS, NEW, PART = 80, 4, 32
WINDOWS = (None, 3, 40)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use small parts and blocks of keys, so that short rows have several."""
    from tlt.attention import kernels

    monkeypatch.setattr(kernels, "PART", PART)
    monkeypatch.setattr(kernels, "_BLOCK_BYTES", 1)
    with products_as_on_a_gpu():
        yield


class Case(NamedTuple):
    """A layer, and the new tokens of a pass."""

    layer: Tensor
    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def random(cls, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> Case:
        """Return a case whose keys and values, where no row has any, are large, so that reading them shows."""
        generator = torch.Generator().manual_seed(heads * size)
        rows = len(LENGTHS)
        layer = torch.randn(2, rows, kv_heads, TOKENS, size, generator=generator)
        for row, length in enumerate(LENGTHS):
            layer[:, row, :, max(length, 0) :] = 1e4
        # views of a wider tensor, as the fused decoder has them
        mixed = torch.randn(rows * NEW, heads + 2 * kv_heads, size, generator=generator).to(dtype)
        return cls(layer.to(dtype), *mixed.split([heads, kv_heads, kv_heads], dim=1))

    def attended(self, window: int | None = None) -> Tensor:
        """Return the output [B, N, H * E] of the kernels in one pass."""
        return attended(self.layer, 0, LENGTHS, NEW, self.query, self.key, self.value, window, TOKENS)


def attended(
    layer: Tensor,
    first: int,
    lengths: Sequence[int],
    new: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    longest: int,
) -> Tensor:
    from tlt.attention import kernels

    given = torch.tensor(lengths)
    kernels.store(layer, first, given, new, key, value)
    return kernels.attend(layer, first, given, new, query, window, longest).view(len(lengths), new, -1)


def plainly(layer: Tensor, slot: int, position: int, query: Tensor, window: int | None) -> Tensor:
    """Return the attention [H * E] of query [H, E] at a position, in float64, one head at a time."""
    share = len(query) // layer.shape[2]
    keys, values = layer[:, slot, :, max(0, position + 1 - window) if window else 0 : position + 1].double()
    scores = [keys[h // share] @ q.double() / len(q) ** 0.5 for h, q in enumerate(query)]
    return torch.cat([score.softmax(0) @ values[h // share] for h, score in enumerate(scores)])


@not_in_the_interpreter
def test_the_kernels_in_tritons_interpreter() -> None:
    run_in_the_interpreter(__file__)


@in_the_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 8), (2, 2, 24), (20, 1, 16)])
def test_each_token_attends_to_its_window(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    case = Case.random(heads, kv_heads, size, dtype)
    for window in WINDOWS:
        found = case.attended(window)
        assert torch.equal(found[1], torch.zeros_like(found[1])), "the output of padding is 0"
        for row, length in enumerate(LENGTHS):
            for n in range(NEW if length >= 0 else 0):
                wanted = plainly(case.layer, row, length + n, case.query[row * NEW + n], window)
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(found[row, n].double(), wanted, rtol=0, atol=tolerance)


@in_the_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_keys_and_values_are_stored(dtype: torch.dtype) -> None:
    case = Case.random(6, 3, 8, dtype)
    before = case.layer.clone()
    case.attended()
    for row, length in enumerate(LENGTHS):
        if length >= 0:
            new = torch.stack([case.key, case.value])[:, row * NEW : (row + 1) * NEW].transpose(1, 2)
            before[:, row, :, length : length + NEW] = new
    assert torch.equal(case.layer, before)


@in_the_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_bits_do_not_depend_on_the_pass(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over several rows and tokens, with many programs or few, has the bits of tokens decoded one at a time."""
    from tlt.attention import kernels

    case = Case.random(6, 2, 16, dtype)
    wanted = case.attended(window)
    for row, length in enumerate(LENGTHS):
        for n in range(NEW if length >= 0 else 0):
            token = slice(row * NEW + n, row * NEW + n + 1)
            query, key, value = (x[token] for x in case[1:])
            alone = attended(case.layer, row, [length + n], 1, query, key, value, window, length + n + 1)
            assert torch.equal(alone[0, 0], wanted[row, n]), (row, n)
    for name in ("_PROGRAMS", "_PARTS_BYTES"):
        monkeypatch.setattr(kernels, name, 1)
        assert torch.equal(case.attended(window), wanted)


@in_the_interpreter
def test_keys_after_a_token_do_not_change_its_bits() -> None:
    """Draft tokens that were not accepted stay behind a row."""
    case = Case.random(4, 2, 16, torch.bfloat16)
    wanted = case.attended()
    for row, length in enumerate(LENGTHS):
        case.layer[:, row, :, max(length, 0) :] = -7
    assert torch.equal(case.attended(), wanted)


@not_in_the_interpreter
@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float32, "fp32")])
@pytest.mark.parametrize(("group", "size"), [(3, 64), (24, 80), (1, 256)])
def test_the_kernels_compile_for_gpus(
    dtype: torch.dtype, name: str, group: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed. This finds code that only the interpreter accepts."""
    from tlt.attention import kernels

    monkeypatch.undo()
    blocks: dict[str, Any] = kernels._blocks(group, size, dtype)
    types = dict.fromkeys(("query", "key", "value", "keys", "values", "out"), f"*{name}")
    types |= {"lengths": "*i64", "sums": "*fp32", "scales": "*fp32"}
    sizes = {"SIZE": size, "SIZE_BLOCK": blocks["SIZE_BLOCK"]}
    compiles(kernels._parts, types, {"KV_HEADS": 2, **blocks})
    compiles(kernels._joined, types, {"PART": blocks["PART"], **sizes})
    compiles(kernels._store, types, {"HEADS": 3, "HEAD_BLOCK": 4, **sizes})
