"""Weights that are not finite are found, and no others."""

from __future__ import annotations

import math

import pytest
import torch

from tlt.rl.finite import NotFinite, refuse_weights
from tlt.rl.parallel import Alone


@pytest.mark.parametrize("values", [[1.0, math.nan], [1.0, math.inf], [math.inf, -math.inf]])
def test_weights_that_are_not_finite_are_named(values: list[float]) -> None:
    """Infinities may cancel in a sum."""
    weights = {"a": torch.ones(2), "b": torch.tensor(values), "c": torch.tensor([math.nan])}
    with pytest.raises(NotFinite, match=r"^b \(and 1 more\) of the policy is not finite at the start"):
        refuse_weights(weights.items(), Alone(), "at the start")


def test_finite_weights_whose_sum_is_not_finite_are_accepted() -> None:
    largest = torch.full((4,), torch.finfo(torch.float32).max)
    assert not largest.sum().isfinite()
    refuse_weights([("a", largest)], Alone(), "at the start")
