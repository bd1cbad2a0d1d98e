"""When to train: on curves of known shape, with the noise that a gate's few prompts have."""

from __future__ import annotations

import json
import random

import pytest

from tlt.draft.gate import TrainingGate

UNROLL = 7


class Curve:
    """A drafter whose accept length goes from `start` towards `best` by training, and loses `drift` a step; fresh
    harvest differs from step to step by `noise`, a paired judgement by `paired`."""

    def __init__(
        self, start: float, best: float, speed: float, noise: float = 0.0, paired: float = 0.0, trained: bool = False
    ) -> None:
        self.now, self.best, self.speed, self.noise, self.paired = start, best, speed, noise, paired
        self.gate, self.rng, self.trained = TrainingGate(UNROLL, trained), random.Random(0), []

    def step(self, drift: float = 0.0) -> None:
        """One rollout with 2 s of idle time."""
        self.now *= 1 - drift
        self.gate.fresh(self.now * self.rng.gauss(1, self.noise))
        self.trained.append(self.gate.should_train())
        if self.trained[-1]:
            better = self.now + self.speed * (self.best - self.now)
            self.gate.gained(self.now, better * self.rng.gauss(1, self.paired), 2.0)
            self.now = better

    def run(self, steps: int, drift: float = 0.0) -> float:
        """The share of these steps in which it trained."""
        for _ in range(steps):
            self.step(drift)
        return sum(self.trained[-steps:]) / steps


def test_stretches_judged_right_after_it_was_found_stale_end_nothing() -> None:
    """Four of them within one rollout, before there is fresh harvest to tell its level by."""
    gate = TrainingGate(UNROLL, trained=True)
    gate.fresh(1.0)  # next to useless: it trains again
    for _ in range(4):
        gate.gained(1.0, 1.0, 1.0)
    assert gate.should_train()


@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_one_that_rises_is_trained_to_the_top_and_then_left_alone(noise: float) -> None:
    curve = Curve(1.0, 4.0, 0.1, noise, noise / 10)
    assert curve.run(25) == 1.0
    assert curve.run(75) < 0.4
    assert curve.now > 0.93 * curve.best, "a stretch gains 1 % there, which is what it costs"
    assert curve.run(200) < 0.05


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_one_that_cannot_gain_is_hardly_touched(noise: float) -> None:
    """Also where no step is like the other: under 5 % of idle time."""
    curve = Curve(4.0, 4.0, 0.1, noise, noise / 10)
    assert curve.run(20) <= 0.5
    assert curve.run(300) < 0.05


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_one_that_goes_stale_is_trained_again(noise: float) -> None:
    curve = Curve(4.0, 4.0, 0.2, noise, noise / 10)
    curve.run(40)
    assert not curve.gate.should_train()
    share = curve.run(150, drift=0.01)
    assert share > 0.1
    assert curve.now > 3.5, "left alone it were 0.9"
    curve.run(30)
    assert curve.run(100) < 0.1, "and once the target stands still, it rests"


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_one_that_was_trained_before_starts_at_rest_until_it_goes_stale(noise: float) -> None:
    curve = Curve(4.4, 4.4, 0.2, noise, noise / 10, trained=True)
    assert curve.run(100) < 0.05
    assert curve.run(150, drift=0.01) > 0.1
    assert curve.now > 3.8


def test_one_that_was_trained_before_but_is_of_little_use_learns_on() -> None:
    curve = Curve(2.0, 4.4, 0.1, trained=True)
    assert curve.run(20) == 1.0


def test_a_slow_loss_is_seen_too() -> None:
    curve = Curve(4.0, 4.0, 0.2, noise=0.03)
    curve.run(40)
    curve.run(300, drift=0.001)
    assert curve.now > 0.9 * curve.best


def test_gains_of_both_signs_that_are_large_are_no_reason_to_rest() -> None:
    gate = TrainingGate(UNROLL)
    gate.fresh(4.0)
    for gain in (0.06, -0.05, 0.07, -0.075) * 2:  # 0.1 % in the mean: judged on a few prompts
        gate.gained(4.0, 4.0 * (1 + gain), 1.0)
    assert gate.should_train()
    for gain in (0.001, -0.001, 0.0005, -0.001) * 2:
        gate.gained(4.0, 4.0 * (1 + gain), 1.0)
    assert not gate.should_train()


def test_from_a_cold_start_it_learns_on_until_it_is_of_use() -> None:
    """The first few responses teach little about others; those of later steps do."""
    curve = Curve(1.0, 1.2, 0.5)
    assert curve.run(40) == 1.0
    curve.best = 4.0
    assert curve.run(40) < 1.0, "and rests at the top"
    assert curve.now > 3.5


def test_a_candidate_that_is_nan_gains_nothing() -> None:
    gate = TrainingGate(UNROLL)
    gate.fresh(4.0)
    for _ in range(4):
        assert gate.should_train()
        gate.gained(4.0, float("nan"), 1.0)
    assert not gate.should_train()


@pytest.mark.parametrize(("gain", "rollout", "pays"), [(0.05, 10.0, True), (0.005, 10.0, False), (0.005, 60.0, True)])
def test_time_that_is_not_idle_is_spent_where_it_comes_back(gain: float, rollout: float, pays: bool) -> None:
    """By hand: 5 % in 2 s, over 20 rollouts of 10 s: 0.025 * 200 = 5 s saved by a second. 0.5 %: half a second."""
    gate = TrainingGate(UNROLL)
    gate.fresh(3.0)
    for _ in range(4):
        assert gate.pays_back(rollout), "till the slope is known"
        assert gate.saves(1.0, rollout) == 0.0
        gate.gained(3.0, 3.0 * (1 + gain), 2.0)
    assert gate.pays_back(rollout) == pays
    assert gate.saves(1.0, rollout) == pytest.approx(gain / 2 * 20 * rollout)
    assert gate.saves(0.5, rollout) == pytest.approx(gain / 4 * 20 * rollout)
    assert gate.should_train()


def test_the_state_comes_back_through_json() -> None:
    curve = Curve(1.0, 4.0, 0.2, 0.02, 0.002)
    for _ in range(60):
        curve.step(drift=0.005)
        other = TrainingGate(UNROLL)
        other.load_state(json.loads(json.dumps(curve.gate.state())))
        assert (other.should_train(), other.pays_back(9.0)) == (curve.gate.should_train(), curve.gate.pays_back(9.0))
        assert other.state() == curve.gate.state()
        curve.gate = other
