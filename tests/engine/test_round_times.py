"""Expected seconds of rounds against numbers worked out by hand."""

from __future__ import annotations

import pytest

from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.round_times import Bucket, RoundTimes, bucket_of, interpolate

CHAIN = Strategy("eagle", 2, 1, 3)
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


def test_interpolation_is_linear_and_constant_beyond_the_points() -> None:
    points = {1: 1.0, 3: 2.0}
    assert [interpolate(points, x) for x in (0, 1, 2, 3, 9)] == [1.0, 1.0, 1.5, 2.0, 2.0]


def test_without_timed_rounds_the_profile_is_used(times: RoundTimes) -> None:
    assert [times.profiled(PLAIN, rows) for rows in (1, 2, 4, 9)] == [1.0, 1.5, 2.5, 2.5]
    assert times.seconds(CHAIN, FOUR) == 5.0


def test_a_strategy_without_rounds_follows_the_plain_rounds_of_its_bucket(times: RoundTimes) -> None:
    times.add_rounds(FOUR, PLAIN, [5.0, 4.0, 90.0])
    assert times.seconds(PLAIN, FOUR) == 5.0, "the median"
    assert times.seconds(CHAIN, FOUR) == 5.0 * 5.0 / 2.5, "twice the profile, as plain rounds take"
    assert times.seconds(CHAIN, Bucket(0, 0)) == 2.0, "no round of that bucket was timed"
    assert times.seconds(CHAIN, Bucket(2, 1)) == 5.0


def test_the_profile_counts_as_one_round(times: RoundTimes) -> None:
    times.add_rounds(FOUR, CHAIN, [8.0, 8.0, 8.0])
    assert times.seconds(CHAIN, FOUR) == (3 * 8.0 + 5.0) / 4


def test_the_last_64_rounds_are_kept(times: RoundTimes) -> None:
    times.add_rounds(FOUR, PLAIN, [9.0] * 100)
    times.add_rounds(FOUR, PLAIN, [3.0] * 64)
    assert times.rounds(PLAIN, FOUR) == 64
    assert times.seconds(PLAIN, FOUR) == 3.0


def test_three_rounds_do_not_time_a_look_ahead_width(times: RoundTimes) -> None:
    times.add_rounds(FOUR, AHEAD, [90.0] * 3)
    assert times.seconds(AHEAD, FOUR) == 10.0
    times.add_rounds(FOUR, AHEAD, [90.0])
    assert times.seconds(AHEAD, FOUR) == (4 * 90.0 + 10.0) / 5


def test_a_round_of_fewer_rows_is_a_share_of_the_full_bucket(times: RoundTimes) -> None:
    assert times.share(PLAIN, 4) == 1.0
    assert times.share(PLAIN, 3) == pytest.approx(2.0 / 2.5)


def test_the_most_rows_within_a_time(times: RoundTimes) -> None:
    """Plain rounds of 1, 2, 3, 4 rows take 1, 1.5, 2, 2.5 s."""
    assert times.most_rows(1, 1.03) == 1
    assert times.most_rows(1, 1.8) == 2
    assert times.most_rows(2, 1.4) == 3
    assert times.most_rows(6, 1.03) == 6, "beyond the profile"


def test_a_checkpoint_keeps_the_rounds_of_known_strategies(times: RoundTimes) -> None:
    times.add_rounds(FOUR, PLAIN, [5.0])
    times.add_rounds(FOUR, CHAIN, [7.0])
    loaded = RoundTimes(lambda: PROFILE)
    loaded.load_state(times.state(), [PLAIN])
    assert loaded.state() == [[[2, 0], list(PLAIN), [5.0]]]
