"""Acceptance rate by depth, worked by hand, and weights that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from tlt.draft.chains import Draft
from tlt.engine.committing import num_accepted
from tlt.engine.state import count_depths
from tlt.rl.measure import NotFinite, acceptance_by_depth, refuse_weights
from tlt.rl.parallel import Alone
from tlt.types import RolloutStats


def test_acceptance_by_depth_of_four_drafts() -> None:
    """The first draft is accepted to its end. The second and third fail at depth 2 and 1. The fourth has one token."""
    stats = RolloutStats()
    for length, sampled in ((3, [1, 2, 3, 9]), (3, [1, 9, 9, 9]), (3, [9, 9, 9, 9]), (1, [1, 9])):
        draft = Draft(range(1, length + 1))
        count_depths(stats, "eagle", [(draft, num_accepted(draft, sampled))])
    assert stats.accepted_to == {"eagle 3": 1, "eagle 1": 2, "eagle 0": 1}
    assert acceptance_by_depth(stats.verified_to, stats.accepted_to) == {"eagle": {"1": 3 / 4, "2": 1 / 2, "3": 1.0}}


def test_two_workers_are_one_sum() -> None:
    one = RolloutStats(verified_to={"eagle 1": 3, "suffix 1": 1}, accepted_to={"eagle 1": 3, "suffix 0": 1})
    both = one + RolloutStats(verified_to={"eagle 1": 1}, accepted_to={"eagle 0": 1})
    assert acceptance_by_depth(both.verified_to, both.accepted_to) == {"eagle": {"1": 0.75}, "suffix": {"1": 0.0}}


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
