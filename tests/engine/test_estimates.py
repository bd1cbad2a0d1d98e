"""Expected seconds of rounds against numbers worked out by hand."""

from __future__ import annotations

import weakref

import pytest

from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.estimates import AcceptanceModel, Bucket, RoundTimes, bucket_of

CHAIN = Strategy("eagle", 2)
AHEAD = PLAIN._replace(ahead=16)
PROFILE = {
    1: {PLAIN: 1.0, CHAIN: 2.0, AHEAD: 4.0},
    4: {PLAIN: 2.5, CHAIN: 5.0, AHEAD: 10.0},
}
FOUR = Bucket(2, 0)


@pytest.fixture
def times() -> RoundTimes:
    return RoundTimes(lambda: PROFILE)


def test_buckets_are_powers_of_two_and_of_four() -> None:
    assert [bucket_of(rows, 1.0).rows for rows in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
    assert [bucket_of(1, context).context for context in (1, 256, 257, 1024, 1025, 4096)] == [0, 0, 1, 1, 2, 2]


def test_without_timed_rounds_the_profile_is_used(times: RoundTimes) -> None:
    assert [times.profiled(PLAIN, rows) for rows in (1, 2, 4, 9)] == [1.0, 1.5, 2.5, 2.5]
    assert times.seconds(CHAIN, FOUR) == 5.0


def test_the_profile_does_not_keep_what_measured_it() -> None:
    held = {"drafters"}
    times, alive = RoundTimes(lambda held=held: {len(held): {PLAIN: 2.0}}), weakref.ref(held)
    del held
    assert times.profiled(PLAIN, 1) == 2.0
    assert alive() is None


def test_a_strategy_without_rounds_follows_the_plain_rounds_of_its_bucket(times: RoundTimes) -> None:
    times.add_rounds(FOUR, PLAIN, [5.0, 4.0, 90.0])
    assert times.seconds(PLAIN, FOUR) == 5.0, "the median"
    assert times.seconds(CHAIN, FOUR) == 5.0 * 5.0 / 2.5, "twice the profile, as plain rounds take"
    assert times.seconds(CHAIN, Bucket(0, 0)) == 2.0, "no round of that bucket was timed"
    assert times.seconds(CHAIN, Bucket(2, 1)) == 5.0


def test_the_last_64_rounds_are_kept(times: RoundTimes) -> None:
    times.add_rounds(FOUR, PLAIN, [9.0] * 100)
    times.add_rounds(FOUR, PLAIN, [3.0] * 64)
    assert times.rounds(PLAIN, FOUR) == 64
    assert times.seconds(PLAIN, FOUR) == 3.0


def test_three_rounds_do_not_time_a_look_ahead_width(times: RoundTimes) -> None:
    times.add_rounds(FOUR, AHEAD, [90.0] * 3)
    assert times.seconds(AHEAD, FOUR) == 10.0
    times.add_rounds(FOUR, AHEAD, [90.0])
    assert times.seconds(AHEAD, FOUR) == 50.0, "the profile counts as 4 rounds"


EAGLE = "eagle"


def test_chains_that_were_cut_count_only_their_verified_tokens() -> None:
    """There are chains of two: three rows accept one token and reject the next, five accept both, and two reject the
    first. In the same round there are chains of three: one is accepted to the end, and one is rejected at the third
    token. The numbers are worked by hand."""
    model = AcceptanceModel()
    model.add(EAGLE, [3, 3], [4, 3])
    model.add(EAGLE, [2] * 10, [2] * 3 + [3] * 5 + [1] * 2)
    assert model.seen[EAGLE][:4].tolist() == [[12, 10], [10, 7], [2, 1], [0, 0]]
    one = model.chances(EAGLE, 4, 0.5)
    assert one[:2] == pytest.approx([(10 + 2 * 0.5) / 14, (7 + 2 * one[0]) / 12])
    assert one[3] == one[2], "of a level that no row reached, the one before it tells most"


def test_lasting_rates_are_over_more_rounds_and_change_only_with_their_own() -> None:
    """8 rows accept one of two tokens, and 256 rounds later 8 rows accept none."""
    model = AcceptanceModel()
    model.add(EAGLE, [2] * 8, [2] * 8)
    for _ in range(256):
        model.age()
    assert model.chances(EAGLE, 2, 0.1) == pytest.approx([0.1, 0.1], abs=0.1)
    assert model.lasting(EAGLE, 0.5) == pytest.approx(9 / 10)
    model.add(EAGLE, [2] * 8, [1] * 8)
    kept = 255 / 256
    assert model.lasting(EAGLE, 0.5) == pytest.approx((8 * kept + 1) / (8 * kept + 10))
    model.forget("eagle")
    assert model.lasting(EAGLE, 0.5) == 0.5
