"""Acceptance rates by level, against counts by hand."""

from __future__ import annotations

import pytest

from tlt.engine.acceptance import AcceptanceModel

EAGLE = ("eagle", 1)


def test_chains_that_were_cut_count_only_their_verified_tokens() -> None:
    """There are chains of two: three rows accept one token and reject the next, five accept both, and two reject the
    first. In the same round there are chains of three: one is accepted to the end, and one is rejected at the third
    token. The numbers are worked by hand."""
    model = AcceptanceModel()
    model.add(EAGLE, [3, 3], [4, 3])
    model.add(EAGLE, [2] * 10, [2] * 3 + [3] * 5 + [1] * 2)
    assert model.seen[EAGLE][:4].tolist() == [[12, 10], [10, 7], [2, 1], [0, 0]]
    one = model.chances(EAGLE, 4, [0.5])
    assert one[:2] == pytest.approx([(10 + 2 * 0.5) / 14, (7 + 2 * one[0]) / 12])
    assert one[3] == one[2], "of a level that no row reached, the one before it tells most"


def test_acceptance_rates_follow_a_change_and_are_kept_by_drafter() -> None:
    model = AcceptanceModel()
    for turn in range(400):
        model.age()
        model.add(*((EAGLE, [2] * 4, [3] * 4) if turn < 200 else (("suffix", 2), [2] * 4, [1] * 4)))
    assert model.chances(EAGLE, 1, [0.5])[0] > 0.8, "older rounds count less"
    assert model.chances(("suffix", 2), 1, [0.5])[0] < 0.01
    model.forget("eagle")
    assert set(model.seen) == {("suffix", 2)}
    model.assume("eagle", 0.5)
    assert model.seen[EAGLE][:3].tolist() == [[8, 4], [4, 2], [2, 1]]


def test_only_the_counts_of_drafters_that_are_used_are_loaded() -> None:
    model, back = AcceptanceModel(), AcceptanceModel()
    model.add(EAGLE, [2], [3])
    model.add(("suffix", 2), [1], [1])
    back.load_state(model.state(), {"suffix"})
    assert set(back.seen) == {("suffix", 2)}
    assert back.seen["suffix", 2][:2].tolist() == [[1, 0], [0, 0]]
