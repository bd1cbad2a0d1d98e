"""When to train: decisions from numbers that were recorded, and from worlds whose law of learning is known."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from dataclasses import replace

import pytest

from tlt.draft.gate import SpotReport, Thresholds, TrainingGate
from tlt.draft.horizon import (
    Curve,
    Horizon,
    Learning,
    RoundCosts,
    accept_length,
    agreement_of,
    decide,
    mean_speed,
    speed,
    speeds,
)

UNROLL = 7
CHAINS = (2, 4, 8, 16)
MEASURED = RoundCosts(1.0, 1.74e-3, {d: (1.74 + 1.26 + 0.45 * d) * 1e-3 for d in CHAINS})
"""of rounds at batch 1 on the machine that the rule was made for"""


def miss(agreement: float) -> float:
    return math.log(1 - agreement)


def test_speed_by_hand() -> None:
    """Two guesses at 0.5: 1.75 tokens in 2 seconds, where plain decoding commits 2; at 0.9 four of them 4.0951 in 3."""
    costs = RoundCosts(1.0, 1.0, {2: 2.0, 4: 3.0})
    assert speed(0.5, costs) == 1.0
    assert speed(0.9, costs) == pytest.approx(4.0951 / 3)
    assert speed(0.6, MEASURED) == 1.0
    assert speed(0.66, MEASURED) == 1.0
    assert speed(0.75, MEASURED) > 1.03


def test_what_drafts_without_it_is_what_it_must_beat() -> None:
    """Suffixes alone make decoding 1.3 times as fast: a drafter of 0.8 adds nothing to that, one of 0.9 does."""
    costs = RoundCosts(1.0, 1.0, {4: 3.0}, fallback=1.3)
    assert speed(0.8, costs) == 1.3
    assert speed(0.9, costs) == pytest.approx(4.0951 / 3)
    best = LONG, [MEASURED._replace(fallback=2.5)]
    assert not decide(FALLEN._replace(best=miss(0.85)), *best, UNROLL, least=0.01).trains, "it comes to 2.1"
    assert decide(FALLEN._replace(best=miss(0.85)), LONG, [MEASURED], UNROLL, least=0.01).trains


def test_several_sizes_of_rounds_count_by_their_seconds() -> None:
    """10 s of rounds that get twice as fast, and 10 s of rounds that do not: 20 s become 15."""
    costs = [RoundCosts(10.0, 1.0, {1: 0.75}), RoundCosts(10.0, 1.0, {1: 9.0})]
    assert mean_speed(speeds(0.5, costs, UNROLL)) == pytest.approx(20 / 15)


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.7, 0.9])
def test_an_accept_length_tells_the_agreement(agreement: float) -> None:
    assert agreement_of(accept_length(agreement, UNROLL), UNROLL) == pytest.approx(agreement, abs=1e-6)


def test_learning_and_drift_by_hand() -> None:
    """From 10 s to 40 s with b = 0.5, 1 - a is halved; a drift of ln 2 takes that back, and the 30 s with it."""
    start = Learning(miss(0.2), 10.0, 0.5)
    after = start.next_step(30.0)
    assert (1 - math.exp(after.miss), after.seconds) == (pytest.approx(0.6), pytest.approx(40.0))
    drifted = start._replace(drift=math.log(2)).next_step(30.0)
    assert (drifted.miss, drifted.seconds) == (pytest.approx(start.miss), pytest.approx(10.0))
    assert start._replace(best=miss(0.5)).next_step(1e6).miss == pytest.approx(miss(0.5)), "beyond it nothing is known"
    assert start._replace(best=miss(0.1)).next_step(30.0).miss == start.miss, "nor where it is better than that"


COLD = Learning(miss(0.01), 3.0, 0.4)
GOOD = Learning(miss(0.8), 60.0, 0.35)
FALLEN = Learning(miss(0.2), 3.0, 0.35)
RUN = Horizon(steps=200, rollout_seconds=3.0, idle_seconds=1.0, second_costs=0.12)
TABLE = {
    "a cold start with a long run before it": (COLD, RUN, True),
    "a cold start that cannot get past break-even in time": (COLD, RUN._replace(steps=10), False),
    "one that gets past it": (COLD, RUN._replace(steps=60, rollout_seconds=12.0, idle_seconds=4.0), True),
    "a good one that can still gain": (GOOD, RUN, True),
    "but not in the last steps": (GOOD, RUN._replace(steps=2), False),
    "nor in the very last": (GOOD, RUN._replace(steps=0), False),
    "nor where its neighbours pay too much": (GOOD, RUN._replace(second_costs=1.0), False),
    "nor where it learns no more": (GOOD._replace(slope=0.0), RUN, False),
    "nor if all that is known of it is what it has": (GOOD._replace(best=GOOD.miss), RUN, False),
    "one that fell far, by what it was": (FALLEN._replace(best=GOOD.miss), RUN, True),
    "one that drifts": (GOOD._replace(best=miss(0.82), drift=0.01), RUN, True),
    "time that is not idle, where it repays": (FALLEN, RUN._replace(rollout_seconds=30.0, second_costs=1.0), True),
    "and where it does not": (FALLEN, RUN._replace(rollout_seconds=1.0, second_costs=1.0), False),
    "no idle time": (COLD, RUN._replace(idle_seconds=0.0), False),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_is_decided(name: str) -> None:
    learning, horizon, trains = TABLE[name]
    decision = decide(learning, horizon, [MEASURED], UNROLL, least=Thresholds().least_saving)
    assert decision.trains == trains, decision
    assert json.loads(json.dumps(decision.numbers()))["steps"] == horizon.steps


LONG = RUN._replace(steps=60, rollout_seconds=12.0, idle_seconds=4.0)


@pytest.mark.parametrize(("learning", "horizon"), [(COLD, LONG), (GOOD, RUN._replace(steps=30))])
def test_the_plan_is_the_cheapest_of_all(learning: Learning, horizon: Horizon) -> None:
    """Against every length of training, step by step; the rule tries powers of two alone."""
    learning = learning._replace(drift=0.003)

    def price(training: int) -> float:
        at, total = learning, 0.0
        for step in range(horizon.steps):
            before, now = (speed(1 - math.exp(x.miss), MEASURED) for x in (learning, at))
            total += horizon.rollout_seconds * before / now
            idle = horizon.idle_seconds if step < training else 0.0
            total += idle * horizon.second_costs
            at = at.next_step(idle)
        return total

    decision = decide(learning, horizon, [MEASURED], UNROLL, least=Thresholds().least_saving)
    best = price(0) - min(price(k) for k in range(horizon.steps + 1))
    assert 0.8 * best <= decision.saves <= best + 1e-9
    tried = {price(0) - price(k) for k in (1, 2, 4, 8, 16, 32, horizon.steps) if k <= horizon.steps}
    assert decision.saves == pytest.approx(max(tried), rel=0.02)


def test_a_long_run_is_planned_in_parts_that_are_as_long_as_their_steps() -> None:
    """640 steps are as 64 of ten times the seconds, the idle time and the drift."""
    learning, horizon = Learning(miss(0.6), 10.0, 0.4), Horizon(640, 6.0, 2.0, 0.12)
    parts = horizon._replace(steps=64, rollout_seconds=60.0, idle_seconds=20.0)
    one, other = (
        decide(learning._replace(drift=drift), over, [MEASURED], UNROLL, 0.01)
        for drift, over in ((0.002, horizon), (0.02, parts))
    )
    assert one.trains
    assert (one.saves, one.seconds) == (pytest.approx(other.saves), pytest.approx(other.seconds))
    assert one.speed_trained == pytest.approx(other.speed_trained)


def test_where_no_seconds_are_known_drafting_goes_on_at_one_cost() -> None:
    decision = decide(COLD, RUN, [], UNROLL, least=Thresholds().least_saving)
    assert decision.trains
    assert decision.speed == pytest.approx(accept_length(0.01, UNROLL))


# -- catching up -----------------------------------------------------------------------------------------------------


BEHIND = Horizon(steps=100, rollout_seconds=3.0, idle_seconds=0.5, second_costs=0.12, workers=2)
FAR_BEHIND = FALLEN._replace(slope=0.6)
CATCH_UPS = {
    "one that fell far, with a long run before it": (FAR_BEHIND, BEHIND, True),
    "not near the end": (FAR_BEHIND, BEHIND._replace(steps=6), False),
    "nor one that is good": (GOOD, BEHIND, False),
    "nor where idle time does it": (FAR_BEHIND, BEHIND._replace(idle_seconds=30.0, second_costs=0.0), False),
    "nor where it learns no more": (FAR_BEHIND._replace(slope=0.0), BEHIND, False),
    "nor where there is nobody to": (FAR_BEHIND, BEHIND._replace(workers=0), False),
}


@pytest.mark.parametrize("name", CATCH_UPS)
def test_a_step_is_held_up_where_that_repays_beyond_what_idle_time_would(name: str) -> None:
    learning, horizon, catches_up = CATCH_UPS[name]
    decision = decide(learning, horizon, [MEASURED], UNROLL, least=Thresholds().least_saving)
    assert (decision.catch_up > 0) == catches_up, decision


def test_as_long_as_is_cheapest() -> None:
    """Against the price of every length, step by step, with training in the idle time of every step."""

    def price(seconds: float) -> float:
        at, total = FAR_BEHIND.trained(2 * seconds), seconds
        for _ in range(BEHIND.steps):
            before, now = (speed(1 - math.exp(x.miss), MEASURED) for x in (FAR_BEHIND, at))
            total += BEHIND.rollout_seconds * before / now + BEHIND.idle_seconds * BEHIND.second_costs
            at = at.next_step(BEHIND.idle_seconds)
        return total

    decision = decide(FAR_BEHIND, BEHIND, [MEASURED], UNROLL, least=Thresholds().least_saving)
    best = min(1.5 * 2**k for k in range(7) if price(1.5 * 2**k) == min(price(1.5 * 2**n) for n in range(7)))
    assert decision.seconds == BEHIND.steps * BEHIND.idle_seconds + 2 * decision.catch_up
    assert decision.catch_up == best
    assert price(best) < price(0.0)


def test_it_is_done_in_parts_and_by_a_pace_that_was_measured() -> None:
    gate = TrainingGate(UNROLL)
    for _ in range(2):
        gate.fresh(1.1)
        gate.rollout_ended(BEHIND, [MEASURED])
    assert gate.decision
    assert gate.decision.catch_up > 0
    assert gate.catch_up(1.0) == 0.0, "nobody has trained yet"
    gate.trained_for(SpotReport(4, 1000, 4 * Thresholds().pace))
    assert gate.catch_up(1.0) == BEHIND.rollout_seconds
    assert gate.catch_up(0.5) == BEHIND.rollout_seconds / 2
    assert gate.catch_up(0.0) == 0.0
    assert gate.catch_up(99.0) == gate.decision.catch_up


def test_what_is_never_judged_holds_nobody_up_for_long() -> None:
    """As where all responses are shorter than what a judgement needs."""
    gate, held_up = TrainingGate(UNROLL), 0.0
    gate.fresh(1.1)
    for _ in range(200):
        gate.rollout_ended(BEHIND, [MEASURED])
        seconds = gate.catch_up(1.0)
        gate.trained_for(SpotReport(8, 2000, 8 * Thresholds().pace))
        held_up += seconds
    assert 0 < held_up < 10 * BEHIND.rollout_seconds
    assert gate.tried > Thresholds().trial
    gate.gained(1.1, 1.3, 5.0)
    assert gate.unjudged == 0


def test_an_evaluation_lets_nobody_catch_up_for_longer() -> None:
    gate = TrainingGate(UNROLL)
    gate.fresh(1.1)
    gate.trained_for(SpotReport(8, 2000, 8 * Thresholds().pace))
    for seconds in (3.0, 90.0):
        gate.rollout_ended(BEHIND._replace(rollout_seconds=seconds), [MEASURED])
    assert gate.catch_up(1.0) <= 3.0


def test_idle_time_that_was_of_no_use_is_tried_again() -> None:
    gate = TrainingGate(UNROLL)
    for _ in range(30):
        gate.fresh(1.1)
        gate.rollout_ended(LONG, [MEASURED], 0.001)
    assert gate.used < 0.01
    for _ in range(30):
        gate.rollout_ended(LONG, [MEASURED])
    assert gate.used > 0.9


def test_idle_time_counts_as_far_as_training_gets_it() -> None:
    """Much of it comes in parts that are too short: where a fifth of it was used, a fifth is counted on."""
    gates = [TrainingGate(UNROLL) for _ in range(2)]
    for gate, share in zip(gates, (1.0, 0.2), strict=True):
        for _ in range(20):
            gate.fresh(1.1)
            gate.rollout_ended(LONG._replace(second_costs=0.0), [MEASURED], share * LONG.idle_seconds)
    plenty, little = [gate.decision for gate in gates]
    assert plenty
    assert little
    assert little.seconds == pytest.approx(0.2 * plenty.seconds, rel=0.02)


def test_before_the_first_judgement_the_curve_is_of_so_many_micro_batches() -> None:
    """A model whose micro-batches take a hundred times as long learns as much from each, as far as is known."""
    gates = [TrainingGate(UNROLL), TrainingGate(UNROLL, trained=True)]
    gates[1].fresh(1.5)
    for gate in gates:
        assert gate.curve
        before = gate.curve.seconds
        gate.trained_for(SpotReport())
        assert gate.curve.seconds == before
        gate.trained_for(SpotReport(10, 1000, 10 * 100 * Thresholds().pace))
        assert gate.curve.seconds == pytest.approx(100 * before)
        gate.gained(1.5, 1.6, 300.0)
        points = list(gate.curve.points)
        gate.trained_for(SpotReport(10, 1000, 1.0))
        assert gate.curve.points == points, "now it is known"


def test_looks_count_by_rounds() -> None:
    """At 2 and at 6 tokens a round: 24 tokens are 8 rounds, 3 each, not 4."""
    gate = TrainingGate(UNROLL)
    for length in (2.0, 6.0):
        gate.fresh(length)
    assert accept_length(1 - math.exp(gate._present()[0]), UNROLL) == pytest.approx(3.0, rel=1e-3)


def test_looks_at_the_drafter_before_say_what_is_known_of_the_one_in_use() -> None:
    """One judgement is of few prompts: what it gained is added to what all looks of late have said."""
    gate = TrainingGate(UNROLL)
    for length in (2.0, 2.4, 2.2, 6.0):  # the last one is of an easy prompt
        gate.fresh(length)
    before, _ = gate._present()
    gate.gained(6.0, 6.2, 3.0, published=True)
    gained = gate._miss(6.2) - gate._miss(6.0)
    assert gate._present()[0] == pytest.approx(before + gained, abs=0.01)
    assert gate.moved + gate.published == pytest.approx(before + gained, abs=0.01)
    gate.gained(6.2, 6.0, 3.0)
    assert gate._present()[0] == pytest.approx(before + gained, abs=0.01), "that one was not published"


def test_the_luck_of_what_is_published_does_not_add_up() -> None:
    """Of a hundred judgements of drafters that are all alike, those above 2 % are published: nothing was learned."""
    gate, chance = TrainingGate(UNROLL), random.Random(1)
    for _ in range(100):
        candidate = 4.0 * (1 + chance.gauss(0, 0.015))
        gate.gained(4.0, candidate, 3.0, candidate > 1.02 * 4.0)
    assert gate.published > gate._miss(4.0) - 0.1


# -- the curve ---------------------------------------------------------------------------------------------------------


def test_the_curve_is_found_again() -> None:
    curve = Curve(3.0, 0.0, 0.35)
    for x in (6.0, 12.0, 24.0, 48.0, 96.0, 192.0):
        curve.add(x - curve.seconds, -0.5 * math.log(x / 3.0))
    c, b, doubt = curve.fit()
    assert (b, c) == (pytest.approx(0.5, abs=0.02), pytest.approx(0.5 * math.log(3.0), abs=0.08))
    assert doubt < 0.05
    assert curve.position(-0.5 * math.log(10.0)) == pytest.approx(30.0, rel=0.1)


def test_before_anything_was_judged_it_is_what_was_measured_elsewhere_with_much_doubt() -> None:
    assert Curve(3.0, 0.0, 0.5).fit()[1:] == (pytest.approx(0.5), pytest.approx(0.15))


def test_noise_makes_the_pessimistic_side_flat() -> None:
    rng = random.Random(0)
    curve = Curve(100.0, -1.6, 0.35)
    for _ in range(5):
        curve.add(5.0, -1.6 + rng.gauss(0, 0.1))
    _, b, doubt = curve.fit()
    assert b - doubt < 0.3


# -- worlds ------------------------------------------------------------------------------------------------------------


class World:
    """A drafter that learns by a power law towards `best`; `noise` is of looks and judgements."""

    def __init__(self, seconds: float, best: float = 0.9, noise: float = 0.0, trained: bool = False) -> None:
        self.seconds, self.slope, self.best, self.noise = seconds, 0.4, best, noise
        self.gate = TrainingGate(UNROLL, trained, Thresholds())
        self.rng, self.trained = random.Random(0), list[bool]()

    @property
    def agreement(self) -> float:
        return min(self.best, 1 - math.exp(-self.slope * math.log((3.0 + self.seconds) / 3.0)))

    def seen(self, luck: float) -> float:
        return accept_length(max(0.0, min(0.99, self.agreement + luck)), UNROLL)

    def step(self, left: int, idle: float = 2.0, drift: float = 0.0) -> None:
        """A rollout with so much idle time, in which a stretch is judged, or the drafter at rest is looked at."""
        self.seconds = max(0.0, (3.0 + self.seconds) * math.exp(-drift / self.slope) - 3.0)
        trains = self.gate.should_train()
        self.trained.append(trains)
        luck = self.rng.gauss(0, self.noise)
        before = self.seen(luck)
        self.gate.fresh(before)
        if trains:
            self.seconds += idle
            self.gate.trained_for(SpotReport(round(idle / Thresholds().pace), 1, idle))
            after = self.seen(luck + self.rng.gauss(0, self.noise / 5))  # both were judged on the same harvest
            self.gate.gained(before, after, idle, after > 1.02 * before)
        now = mean_speed(speeds(self.agreement, [MEASURED], UNROLL))
        self.gate.rollout_ended(Horizon(left, 6.0 / now, idle, 0.12), [MEASURED])

    def run(self, steps: int, left: int = 400, drift: float = 0.0) -> float:
        """The share of these steps in which it trained."""
        for number in range(steps):
            self.step(left - number, drift=drift)
        return sum(self.trained[-steps:]) / steps


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_from_a_cold_start_it_learns_until_it_gains_no_more(noise: float) -> None:
    world = World(0.0, best=0.78, noise=noise)
    assert world.run(20) > 0.9
    world.run(120)
    assert world.agreement > 0.75
    assert world.run(100) < 0.3


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_one_that_was_trained_before_rests_until_it_falls(noise: float) -> None:
    world = World(150.0, best=0.8, noise=noise, trained=True)
    assert world.run(60) < 0.1
    world.seconds = 8.0  # the task changed
    assert world.run(12) > 0.6
    world.run(30)
    assert world.agreement > 0.7


@pytest.mark.parametrize("judged", [False, True])
def test_the_first_stretches_after_a_fall_do_not_end_training(judged: bool) -> None:
    """Seen where the task changed: the first one brought 0.013, and training for 12 s would have brought 4. If several
    bring nothing it does end."""
    gate = TrainingGate(UNROLL, trained=True)
    for _ in range(8):
        gate.fresh(6.0)
        gate.rollout_ended(RUN, [MEASURED])
    if judged:
        gate.gained(6.0, 6.0, 40.0)  # late in training nothing more is learned
    assert not gate.should_train()
    cheap = MEASURED._replace(drafted={2: 1.8e-3, 8: 2.2e-3})  # so that even such a drafter is of use
    for fallen in (1.19, 1.18, 1.2):  # none of which is a level that it could not be trained beyond
        gate.fresh(fallen)
        gate.rollout_ended(RUN, [cheap])
        assert gate.should_train()
    for _ in range(Thresholds().trial // 20 - 1):
        gate.trained_for(SpotReport(20, 5000, 1.5))
        gate.gained(1.225, 1.238, 1.5)
        assert gate.should_train()
    for _ in range(3):
        gate.trained_for(SpotReport(20, 5000, 1.5))
        gate.gained(1.225, 1.238, 1.5)
    assert not gate.should_train()


def test_a_slow_drift_is_seen_too() -> None:
    world = World(150.0, best=0.8, trained=True)
    world.run(10)
    assert world.run(150, drift=0.01) > 0.1
    assert world.agreement > 0.65, "left alone it were 0"


def test_one_that_was_trained_before_but_is_of_little_use_learns_on() -> None:
    world = World(10.0, trained=True)
    assert world.agreement < 0.5
    world.run(2)
    assert world.run(10) == 1.0


def test_nothing_is_begun_that_cannot_repay() -> None:
    world = World(0.0)
    world.run(2, left=8)
    assert world.run(6, left=6) == 0.0


def test_stretches_judged_right_after_it_was_found_stale_end_nothing() -> None:
    """Four of them within one rollout, before there is anything else to go by."""
    gate = TrainingGate(UNROLL, trained=True)
    gate.fresh(1.0)
    for _ in range(4):
        gate.gained(1.0, 1.0, 1.0)
    gate.rollout_ended(RUN)
    assert gate.should_train() in (True, False)


def test_a_candidate_that_is_nan_led_nowhere() -> None:
    gates = [TrainingGate(UNROLL) for _ in range(2)]
    for gate, candidate in zip(gates, (float("nan"), 2.0), strict=True):
        gate.gained(2.0, candidate, 1.0)
        gate.rollout_ended(RUN, [MEASURED])
    assert gates[0].state() == gates[1].state()


def test_a_drift_is_seen_however_long_it_rested_before_the_last_training() -> None:
    """0.02 a step, behind many looks and a stretch that was not published."""
    gate, miss_now = TrainingGate(UNROLL, trained=True), -1.6

    def look(miss_now: float) -> None:
        gate.fresh(accept_length(1 - math.exp(miss_now), UNROLL))
        gate.rollout_ended(RUN, [MEASURED])

    for _ in range(20):
        look(miss_now)
    gate.gained(*[accept_length(1 - math.exp(miss_now), UNROLL)] * 2, 2.0)
    for _ in range(8):
        look(miss_now := miss_now + 0.02)
    assert gate.decision
    assert 0.0 < gate.decision.drift <= 0.021


def test_what_training_wins_back_from_a_moving_target_counts_as_learned() -> None:
    """Each stretch gains 0.1, and the target takes it back: the drafter stands still, and learns all the same."""
    gate = TrainingGate(UNROLL)
    lengths = [accept_length(1 - math.exp(miss_now), UNROLL) for miss_now in (-1.0, -1.1)]
    for _ in range(8):
        gate.gained(*lengths, 5.0, published=True)
    assert gate.curve
    steps = [before - after for (_, before), (_, after) in itertools.pairwise(gate.curve.points)]
    assert steps[2:] == pytest.approx([0.1] * len(steps[2:]), abs=0.03)


def test_what_the_target_took_back_step_by_step_is_no_fall() -> None:
    gate = TrainingGate(UNROLL)
    lengths = [accept_length(1 - math.exp(miss_now), UNROLL) for miss_now in (-1.0, -1.1)]
    for _ in range(30):
        gate.gained(*lengths, 5.0, published=True)
    gate.fresh(lengths[0])
    assert gate.curve
    assert gate.curve.judged == 30, "the curve did not begin anew"


@pytest.mark.parametrize(("spread", "falls"), [(0.0, True), (0.3, False)])
def test_one_look_that_is_far_off_is_a_fall_where_looks_are_alike(spread: float, falls: bool) -> None:
    gate = TrainingGate(UNROLL, trained=True)
    for number in range(7):
        gate.fresh(accept_length(1 - math.exp(-1.6 + spread * (-1) ** number), UNROLL))
    before = len(gate.looks)
    gate.fresh(accept_length(1 - math.exp(-1.2), UNROLL))
    assert len(gate.looks) == (1 if falls else before + 1), "what was seen before a fall tells nothing"


def test_as_many_steps_remain_as_the_last_rollout_said() -> None:
    gate = TrainingGate(UNROLL)
    gate.fresh(2.0)
    for steps in (13, 12, 11):
        gate.rollout_ended(RUN._replace(steps=steps), [MEASURED])
        assert gate.decision
        assert gate.decision.steps == steps


@pytest.mark.parametrize("trained", [False, True])
def test_a_resumed_run_decides_as_one_that_goes_on(trained: bool) -> None:
    world = World(150.0 if trained else 0.0, noise=0.01, trained=trained)
    for number in range(40):
        world.step(100 - number, drift=0.01)
        if number % 4:
            continue
        world.gate.rollout_ended(RUN, [MEASURED], 0.3 * RUN.idle_seconds)
        saved = json.loads(json.dumps(world.gate.state()))
        here, there = copy.deepcopy(world.gate), TrainingGate(UNROLL)
        there.load_state(saved)
        for length in (None, 4.0, 1.5):  # the last one is a fall
            for gate in (here, there):
                if length:
                    gate.fresh(length)
                gate.rollout_ended(RUN, [MEASURED], 0.5)
            assert here.decision == there.decision


def test_every_decision_can_be_noted_once() -> None:
    world = World(0.0)
    world.run(3)
    noted = world.gate.taken_note()
    assert len(noted) > 3
    assert noted[-1] == world.gate.decision
    assert world.gate.taken_note() == []


def test_the_state_comes_back_through_json() -> None:
    world = World(0.0, noise=0.01)
    for number in range(40):
        world.step(100 - number, drift=0.005)
        other = TrainingGate(UNROLL, thresholds=replace(Thresholds()))
        other.load_state(json.loads(json.dumps(world.gate.state())))
        other.rollout_ended(RUN, [MEASURED])
        world.gate.costs = [MEASURED]
        assert other.state()["curve"] == world.gate.state()["curve"]
        assert other.state()["looks"] == world.gate.state()["looks"]
    TrainingGate(UNROLL).load_state({"gains": [], "resting": True})  # of an older run: nothing of it fits
    gate = TrainingGate(UNROLL)
    gate.load_state({"curve": [0.6, [[3.0, -0.1]], 2], "looks": [[3, -2.0]], "level": -2.0})
    assert not gate.looks, "judged by other means: it would seem to have fallen"
    assert gate.level == 0.0
