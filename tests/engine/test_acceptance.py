"""How far guesses are right: against numbers worked out by hand, and against the chances that a simulation draws by."""

from __future__ import annotations

import json
import random

import pytest

from tlt.engine.acceptance import AcceptanceModel

EAGLE = ("eagle", 1)


def chances(guesses: AcceptanceModel, levels: int, prior: float = 0.5) -> list[float]:
    return [guesses.chance(EAGLE, level, prior, weight=0.0) for level in range(levels)]


def test_what_was_cut_short_says_nothing_of_what_would_have_come() -> None:
    """Of chains of two: three rows right at once, then wrong; five right to the end; two wrong at once. Of chains of
    three, in the same round: one right to the end, one wrong at the third."""
    guesses = AcceptanceModel()
    guesses.add(EAGLE, [3, 3], [4, 3])
    guesses.add(EAGLE, [2] * 10, [2] * 3 + [3] * 5 + [1] * 2)
    assert chances(guesses, 3) == pytest.approx([10 / 12, 7 / 10, 1 / 2])
    assert [reached for reached, _ in guesses.levels(EAGLE, 4)] == pytest.approx([12, 10, 2, 0])


def test_chains_of_one_round_may_be_of_different_lengths() -> None:
    """One of four, right to its end; one of two, right to its end; one of one, wrong; one of three, wrong at the
    second."""
    guesses = AcceptanceModel()
    guesses.add(EAGLE, [4, 2, 1, 3], [5, 3, 1, 2])
    assert chances(guesses, 4) == pytest.approx([3 / 4, 2 / 3, 1, 1])
    assert [reached for reached, _ in guesses.levels(EAGLE, 5)] == [4, 3, 1, 1, 0]


def test_a_prior_counts_as_much_as_so_many_rows() -> None:
    guesses = AcceptanceModel()
    assert guesses.chance(EAGLE, 5, 0.3, weight=2.0) == 0.3
    guesses.add(EAGLE, [1] * 3, [2, 2, 1])
    assert guesses.chance(EAGLE, 0, 0.3, weight=2.0) == pytest.approx((2 + 0.6) / 5)


def test_chains_of_any_depth_find_the_same_chances() -> None:
    rng, true = random.Random(0), [0.9, 0.7, 0.8, 0.6]
    guesses = AcceptanceModel()
    for turn in range(400):
        depth, tokens = 1 + turn % 4, []
        for _ in range(50):
            right = 0
            while right < depth and rng.random() < true[right]:
                right += 1
            tokens.append(1 + right)
        guesses.add(EAGLE, [depth] * 50, tokens)
    assert chances(guesses, 4) == pytest.approx(true, abs=0.03)


def test_it_follows_a_change_and_keeps_drafters_apart() -> None:
    guesses = AcceptanceModel()
    for turn in range(400):
        guesses.age()
        if turn < 200:
            guesses.add(EAGLE, [2] * 4, [3] * 4)
        else:
            guesses.add(("suffix", 2), [2] * 4, [1] * 4)
    assert chances(guesses, 1) == [1.0]  # the older it is, the less it counts, but it says what it said
    assert guesses.levels(EAGLE, 1)[0][0] < 20
    for _ in range(200):
        guesses.age()
        guesses.add(EAGLE, [2] * 4, [1] * 4)
    assert guesses.chance(EAGLE, 0, 0.5, weight=2.0) < 0.01
    guesses.forget("eagle")
    assert set(guesses.seen) == {("suffix", 2)}
    guesses.assume(EAGLE, 3, 0.5, rows=8)
    assert guesses.levels(EAGLE, 4) == [(8, 4), (4, 2), (2, 1), (0, 0)]


def test_its_state_is_a_copy_that_survives_json() -> None:
    guesses, back = AcceptanceModel(), AcceptanceModel()
    guesses.add(EAGLE, [3] * 3, [4, 2, 1])
    guesses.add(("suffix", 2), [1], [2])
    back.load_state(json.loads(json.dumps(guesses.state())), {"eagle"})
    assert set(back.seen) == {EAGLE}
    assert back.seen[EAGLE].tolist() == guesses.seen[EAGLE].tolist()
    state = guesses.state()
    guesses.add(EAGLE, [3], [1])
    assert state != guesses.state()
