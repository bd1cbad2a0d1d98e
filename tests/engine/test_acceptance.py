"""Acceptance rates by level, against counts by hand."""

from __future__ import annotations

import json

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


def test_lasting_rates_are_over_more_rounds_and_change_only_with_their_own() -> None:
    """8 rows accept one of two tokens, and 256 rounds later 8 rows accept none."""
    model = AcceptanceModel()
    model.add(EAGLE, [2] * 8, [2] * 8)
    for _ in range(256):
        model.age()
    assert model.chances(EAGLE, 2, [0.1]) == pytest.approx([0.1, 0.1], abs=0.1)
    assert model.lasting(EAGLE, 2, 0.5) == pytest.approx([9 / 10, 0.9 * 2 / 10])
    model.add(EAGLE, [2] * 8, [1] * 8)
    kept = 255 / 256
    assert model.lasting(EAGLE, 1, 0.5) == pytest.approx([(8 * kept + 1) / (8 * kept + 10)])
    again = AcceptanceModel()
    again.load_state(json.loads(json.dumps(model.state())), {"eagle"})
    assert again.lasting(EAGLE, 3, 0.5) == model.lasting(EAGLE, 3, 0.5)
    assert again.chances(EAGLE, 3, [0.5]) == model.chances(EAGLE, 3, [0.5])
    again.load_state([("eagle", 1, [[4.0, 2.0]])], {"eagle"})  # of an older version
    assert again.chances(EAGLE, 1, [0.5]) == [0.5]
    model.forget("eagle")
    assert model.lasting(EAGLE, 1, 0.5) == [0.5]


def test_an_evaluation_counts_as_a_few_rows() -> None:
    model = AcceptanceModel()
    model.assume("eagle", 0.5)
    assert model.seen[EAGLE][:3].tolist() == [[8, 4], [4, 2], [2, 1]]
