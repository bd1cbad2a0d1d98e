"""What needs no device. Captures are tested on one (tests/gpu)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tlt.cuda_graph import rounded_up


@given(st.integers(1, 5000), st.sampled_from([1, 2, 4]))
def test_a_count_is_rounded_up_by_less_than_a_part(count: int, parts: int) -> None:
    rounded = rounded_up(count, parts)
    assert count <= rounded < max(2, count * (1 + 1 / parts))
    assert rounded_up(rounded, parts) == rounded


def test_counts_share_few_shapes() -> None:
    assert sorted({rounded_up(n) for n in range(1, 33)}) == [1, 2, 4, 8, 16, 32]
    assert sorted({rounded_up(n, 4) for n in range(128, 513)}) == [128, 160, 192, 224, 256, 320, 384, 448, 512]
