"""Verdict on the gain of speculation. Each test plants a disturbance that once led to a wrong claim."""

from __future__ import annotations

import logging
from math import comb
from typing import Any

import pytest

from tlt.gain import BusyWarning, Gain, gain_of, gained_little, verdict


def line(
    step: int, plain: float, ours: float = 1.0, passes: int = 100, accepted: int = 150, waited: float = 0.0
) -> Any:
    """Return the metrics of a step. Each phase uses 1 s of CPU time and waits `waited` seconds for a core."""
    used = {"cpu_seconds": 1.0, "cpu_wait_seconds": waited}
    return {
        "step": step,
        "seconds": {"compare": plain, "rollout": ours},
        "rollout": {"draft_passes": passes, "accepted": accepted},
        "energy": {"phases": {"compare": used, "rollout": used}},
    }


def lines(*plain: float, **changes: Any) -> list[Any]:
    """Return the metrics of steps 2, 3, ..., whose rollouts take 1 s, and these seconds with plain decoding."""
    return [line(step, seconds, **changes) for step, seconds in enumerate(plain, 2)]


def found(given: list[Any]) -> Gain:
    gain = gain_of(given)
    assert gain
    return gain


def test_a_gain_is_the_median_of_pairs_with_its_interval() -> None:
    gain = found(lines(1.5, 1.7, 1.6))
    assert (gain.times, gain.low, gain.high, gain.accept_length) == (1.6, 1.5, 1.7, 2.5)
    assert verdict(gain) == "rollouts were 1.60 times as fast as plain decoding (median; 1.50 to 1.70 times in 3 steps)"


@pytest.mark.parametrize("number", [1, 3, 5, 6, 8, 9, 12, 20, 41])
def test_the_interval_covers_the_median_with_95_percent_if_the_pairs_suffice(number: int) -> None:
    """The smallest interval of ranks is counted over all outcomes: each pair is above the median or below it."""
    times = [1.0 + rank / 100 for rank in range(1, number + 1)]
    gain = found(lines(*times))
    low, high = (round(100 * (end - 1)) for end in (gain.low, gain.high))
    assert low + high == number + 1, "it is symmetric"

    def covered(rank: int) -> float:
        """The median lies between the two values if at least `rank` values are on each of its sides."""
        return sum(comb(number, below) for below in range(rank, number - rank + 1)) / 2**number

    if number < 6:
        assert low == 1
    else:
        assert covered(low) >= 0.95 > covered(low + 1)


def test_a_disturbed_plain_rollout_without_drafts_is_no_gain() -> None:
    """No token was proposed in four rollouts of 6 s. One rollout with plain decoding took 58.8 s."""
    given = [line(2, 58.8, 6.0, 0, 0), *(line(step, 6.1, 6.0, 0, 0) for step in (3, 4, 5))]
    gain = found(given)
    assert (gain.times, gain.accept_length) == (None, 1.0)
    assert verdict(gain) == (
        "no gain over plain decoding was measured (1.02 to 9.80 times in 4 steps): no draft was used"
    )


def test_a_disturbed_pair_does_not_move_the_claim() -> None:
    quiet, disturbed = found(lines(1.5, 1.6, 1.6, 1.7, 1.7)), found(lines(1.5, 1.6, 1.6, 1.7, 17.0))
    assert quiet.times == disturbed.times == 1.6


def test_the_claim_is_at_most_the_accept_length() -> None:
    """A run's last line claimed 1.21 at an accept length of 1.04."""
    gain = found(lines(1.21, 1.2, 1.25, passes=100, accepted=4))
    assert gain.times == pytest.approx(1.04)
    assert verdict(gain).startswith(
        "rollouts were at most 1.04 times as fast as plain decoding, because that is the acc"
    )
    assert "(the seconds say 1.21, 1.20 to 1.25 times in 3 steps)" in verdict(gain)
    assert found(lines(1.21, 1.2, 1.25, accepted=0)).fault == "hardly any draft token was accepted"


def test_an_interval_that_contains_1_is_no_gain() -> None:
    assert found(lines(1.3, 1.2, 0.99)).fault == "the interval contains 1.00"
    assert found(lines(0.9, 0.8, 0.99)).fault == "speculation was slower than plain decoding"


def test_few_pairs_and_the_start_up_are_no_gain() -> None:
    assert found(lines(1.5, 1.6)).times is None
    assert found([line(1, 1.5)] * 3).times is None, "the first step includes the start-up"
    slow_start = [line(0, 1.0, 10.0, accepted=0), *lines(1.5, 1.6, 1.7)]
    assert found(slow_start) == found(slow_start[1:])
    assert [gained_little(found(lines(*[1.0] * number))) for number in (2, 3)] == [False, True]
    assert gain_of([]) is None
    assert gain_of([{"step": 1, "seconds": {"rollout": 1.0}, "rollout": {}}]) is None, "it was not compared"


def test_busy_cores_make_the_times_worthless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    gain = found(lines(1.5, 1.6, 1.7, waited=0.5))
    assert (gain.times, gain.is_trusted) == (None, False)
    assert "waited 33% of their time for a free core" in verdict(gain)
    assert "end other programs, set OMP_NUM_THREADS=1, or use fewer workers" in verdict(gain)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "end other programs or use fewer workers" in verdict(found(lines(1.5, 1.6, 1.7, waited=0.5)))
    assert found(lines(1.5, 1.6, 1.7, waited=0.1)).times == 1.6
    uncounted = [each | {"energy": {}} for each in lines(1.5, 1.6, 1.7)]
    assert found(uncounted).times == 1.6, "not all systems count it"


@pytest.mark.parametrize("phase", ["compare", "rollout"])
def test_other_work_during_one_of_the_two_rollouts_makes_the_times_worthless(phase: str) -> None:
    given = lines(1.5, 1.6, 1.7)
    for each in given:
        each["energy"]["phases"] |= {phase: {"cpu_seconds": 1.0, "cpu_wait_seconds": 1.0}}
    assert not found(given).is_trusted


def test_a_run_warns_once_of_busy_cores(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    caplog.set_level(logging.WARNING)
    busy = BusyWarning()
    for waited in (0.5, 3.0, 4.0):
        busy.warn(3, {"cpu_seconds": 4 * waited if waited == 0.5 else waited, "cpu_wait_seconds": waited})
    busy.warn(4, {})
    assert [record.getMessage() for record in caplog.records] == [
        "in step 3 the run's threads waited 50% of their time for a free core, because other work used the cores: end "
        "other programs, set OMP_NUM_THREADS=1, or use fewer workers"
    ]
