"""The fitted slope of the law of learning: hand-worked sums, and that luck in judgements cancels out."""

from __future__ import annotations

import random

import pytest

from tlt.draft.slope import FittedSlope


def fitted(weight: float = 0.5, keeps: float = 1.0) -> FittedSlope:
    return FittedSlope(1.0, weight, keeps)


def test_it_is_what_was_gained_by_how_far_training_went() -> None:
    """By hand, with b = 1 before for half a step of ln x: (0.5 + 0.6) / (0.5 + 0.2), and so on."""
    slope = fitted()
    assert slope.value == 1.0
    slope.judged(0.6, 0.2)
    assert slope.value == pytest.approx(1.1 / 0.7)
    slope.judged(0.1, 0.3)
    assert slope.value == pytest.approx(1.2 / 1.0)


def test_older_judgements_count_for_less() -> None:
    slope = fitted(keeps=0.5)
    slope.judged(0.4, 0.2)
    slope.fade()
    slope.judged(0.1, 0.2)
    assert slope.value == pytest.approx((0.5 + 0.2 + 0.1) / (0.5 + 0.1 + 0.2))


def test_it_is_never_below_0() -> None:
    slope = fitted()
    slope.judged(-9.0, 0.1)
    assert slope.value == 0.0


@pytest.mark.parametrize("truly", [0.0, 0.03])
def test_publishing_what_is_better_by_luck_does_not_make_it_steeper(truly: float) -> None:
    """Every candidate is better by `truly` than the one before; a judgement errs by 0.05. It is published where it
    seems better by 0.05, so what is published seems better than it is."""
    rng, slope, ahead, lucky, n = random.Random(0), fitted(weight=0.0), 0, 0.0, 20_000
    for _ in range(n):
        ahead += 1
        seen = ahead * truly + rng.gauss(0, 0.05)
        slope.judged(seen, ahead)
        if seen > 0.05:
            lucky, ahead = lucky + seen, 0
    assert slope.value == pytest.approx(truly, abs=0.002)
    assert lucky / n > truly + 0.01, "the sum of what was published is too much"


def test_a_restored_one_goes_on_as_the_one_that_was_saved() -> None:
    one, other = fitted(), fitted()
    one.judged(0.03, 0.1)
    other.load_state(one.state())
    for slope in (one, other):
        slope.judged(0.2, 0.1)
    assert one == other
