"""Expected seconds of rounds against numbers worked out by hand."""

from __future__ import annotations

import pytest

from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.round_times import Bucket, RoundTimes, bucket_of

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


def test_without_timed_rounds_the_profile_is_used(times: RoundTimes) -> None:
    assert [times.profiled(PLAIN, rows) for rows in (1, 2, 4, 9)] == [1.0, 1.5, 2.5, 2.5]
    assert times.seconds(CHAIN, FOUR) == 5.0


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
    assert times.seconds(AHEAD, FOUR) == (4 * 90.0 + 10.0) / 5
