"""Numbers of keys with equal sums, against attention over all numbers of masked keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.attention.key_counts import BLOCK, QUERIES, full_queries, key_counts, rounded_down, rounded_up

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def attention(query: Tensor, both: Tensor, length: int, tokens: int) -> Tensor:
    mask = torch.zeros(1, 1, query.shape[2], tokens, dtype=query.dtype)
    mask[..., length:] = -torch.inf
    return F.scaled_dot_product_attention(query, both[0, :, :, :tokens], both[1, :, :, :tokens], mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 192])
def test_a_sequence_has_the_same_bits_with_any_of_these_numbers_of_keys(dtype: torch.dtype, head_dim: int) -> None:
    random = torch.Generator().manual_seed(head_dim)
    query = torch.randn(1, 2, 32, head_dim, generator=random).to(dtype)
    both = torch.randn(2, 1, 2, 3 * BLOCK, head_dim, generator=random).to(dtype)
    counts, full = key_counts(head_dim, dtype, "cpu"), full_queries(head_dim, dtype)
    assert full <= 32
    for length in (5, 63, 64, 100, 191, 192, 250, 256, 300, 321, 384, 512, 513, 700, 768, 1000, 1024):
        wanted = attention(query, both, length, 3 * BLOCK)
        for tokens in {rounded_up(length + more, counts) for more in range(0, 400, 30)}:
            for queries in range(full, 33, full):
                found = attention(query[:, :, :queries], both, length, tokens)
                assert torch.equal(found, wanted[:, :, :queries]), (length, tokens, queries)


def test_numbers_of_queries_whose_sums_have_another_order_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted kernel has another order for fewer than 16 queries, and for a rest of fewer than 8."""
    original = F.scaled_dot_product_attention

    def planted(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        whole = query.shape[2] - query.shape[2] % 8 if query.shape[2] >= 16 else 0
        turned = original(query[:, :, whole:], keys.flip(2), values.flip(2), mask[:, :, whole:].flip(3))
        return torch.cat([original(query[:, :, :whole], keys, values, mask[:, :, :whole]), turned], 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", planted)
    for dtype in (torch.float32, torch.bfloat16):
        assert full_queries.__wrapped__(64, dtype) == 16
        assert QUERIES % 16 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_does_not_depend_on_the_random_state(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = key_counts.__wrapped__(32, dtype, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert key_counts.__wrapped__(32, dtype, "cpu") == found


def test_a_size_whose_sums_have_another_order_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted kernel sums over 128 keys in reverse order."""
    original = F.scaled_dot_product_attention

    def planted(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        if keys.shape[2] == 128:
            keys, values, mask = keys.flip(2), values.flip(2), mask.flip(3)
        return original(query, keys, values, mask)

    for dtype in (torch.float32, torch.bfloat16):
        assert 128 in key_counts.__wrapped__(64, dtype, "cpu")
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", planted)
            assert 128 not in key_counts.__wrapped__(64, dtype, "cpu")


def test_rounding_up_and_down() -> None:
    counts = (64, 192, BLOCK)
    assert [rounded_up(n, counts) for n in (0, 1, 64, 65, 192, 193, 512, 513, 705)] == [
        0, 64, 64, 192, 192, 512, 512, 576, 1024
    ]  # fmt: skip
    assert [rounded_down(n, counts) for n in (0, 63, 64, 191, 192, 511, 512, 575, 576, 1023)] == [
        0, 0, 64, 64, 192, 192, 512, 512, 576, 704
    ]  # fmt: skip
