"""The schedule, and the worker that trains, by sequences of events that are worked by hand."""

from __future__ import annotations

import json
import math

import pytest

from tlt.spot.schedule import Due, Evaluation, NewestState, Rule, Schedule, SpotReport

RULE = Rule(stretch=2, judged=2, better=1.04, burst=3, averaged=3, rest_share=0.125, fallen=0.8, times=2)
BETTER, WORSE = Evaluation(40, 20.0, 10.0, 8.0), Evaluation(40, 20.0, 20.0, 8.0)
SLIGHTLY, HARMFUL = Evaluation(40, 20.6, 20.0, 8.0), Evaluation(40, 19.0, 20.0, 8.0)


def stretch(schedule: Schedule, found: Evaluation, seconds: float = 0.0) -> Evaluation | None:
    schedule.trained(SpotReport(RULE.stretch, 40, seconds))
    return schedule.evaluated(found)


def at_rest() -> Schedule:
    schedule = Schedule(20, RULE)
    for _ in range(RULE.burst):
        assert not schedule.rests
        stretch(schedule, WORSE)
    assert schedule.rests
    return schedule


def test_an_evaluation_is_due_after_each_interval() -> None:
    schedule, seen = Schedule(20, RULE), []
    for _ in range(4):
        seen.append(schedule.due())
        if seen[-1] is Due.TRAIN:
            schedule.trained(SpotReport(1, 20, 0.1))
        else:
            assert schedule.evaluated(BETTER)
    assert seen == [Due.TRAIN, Due.TRAIN, Due.EVALUATE, Due.TRAIN]


@pytest.mark.parametrize(
    ("candidates", "rests"),
    [
        ((WORSE, WORSE, WORSE), True),
        ((WORSE, WORSE), False),  # too few
        ((BETTER, HARMFUL, HARMFUL), False),  # gains 100, -5 and -5 %: one mishap does not end a burst
        ((BETTER, WORSE, WORSE, HARMFUL), True),  # only the last three count
        ((Evaluation(40, 21.0, 20.0, 8.0), WORSE, WORSE), True),  # 5, 0 and 0 %
        ((SLIGHTLY, SLIGHTLY, SLIGHTLY), True),  # 3 % each, which is not worth the time
    ],
)
def test_a_burst_ends_if_its_last_candidates_gained_little_on_average(
    candidates: tuple[Evaluation, ...], rests: bool
) -> None:
    schedule = Schedule(20, RULE)
    for found in candidates:
        assert not schedule.rests
        stretch(schedule, found)
    assert schedule.rests == rests
    assert (schedule.due() is None) == rests


def test_a_run_that_begins_at_rest_stays_at_rest_after_a_better_candidate() -> None:
    schedule = Schedule(20, RULE, begins_at_rest=True)
    assert schedule.rests
    assert schedule.due() is None
    schedule.rollout_ended(2.0, None)
    assert schedule.due() is Due.TRAIN
    stretch(schedule, BETTER, seconds=0.25)
    assert schedule.rests
    assert schedule.due() is None


def test_paused_training_takes_an_eighth_of_the_rollouts() -> None:
    """Rollouts of 2 s allow 0.25 s each, and a call takes 0.625 s. Time that is not used is lost."""
    schedule, trained = at_rest(), []
    for rollout in range(6):
        schedule.rollout_ended(2.0, None)
        if schedule.due():
            trained.append(rollout)
            schedule.trained(SpotReport(1, 20, 0.625))
    assert trained == [0, 2, 5]  # credit: 0.25, -0.125, 0.125, -0.25, 0, 0.25


def test_an_evaluation_while_paused_uses_the_time() -> None:
    schedule = at_rest()
    schedule.rollout_ended(10.0, None)
    schedule.trained(SpotReport(RULE.stretch, 40, 0.5))
    assert schedule.due() is Due.EVALUATE
    schedule.evaluated(BETTER._replace(seconds=0.75, interrupted=True, entries=10))
    assert schedule.due() is None, "1.25 s of credit are used"
    schedule.rollout_ended(10.0, None)
    assert schedule.evaluated(BETTER._replace(entries=30))


def test_two_rollouts_in_a_row_with_low_acceptance_are_a_change_of_the_task() -> None:
    """If the mean is 0.8, the bound is 0.64. The mean over three rollouts leaves low ones out."""
    schedule = at_rest()
    changes = [schedule.rollout_ended(1.0, rate) for rate in (0.8, 0.6, 0.8, 0.6, 0.5, 0.5)]
    assert changes == [False, False, False, False, True, False]
    assert schedule.acceptance == 0.5, "the new level"
    assert not schedule.rests
    assert schedule.due() is Due.TRAIN


def test_a_burst_uses_all_idle_time_and_owes_none_afterwards() -> None:
    schedule = Schedule(20, RULE)
    for _ in range(RULE.burst):
        assert schedule.due() is Due.TRAIN
        schedule.trained(SpotReport(RULE.stretch, 40, 100.0))
        assert schedule.due() is Due.EVALUATE
        schedule.evaluated(WORSE._replace(seconds=100.0))
    assert schedule.due() is None
    schedule.rollout_ended(1.0, None)
    assert schedule.due() is Due.TRAIN


def test_a_new_burst_judges_only_its_own_candidates() -> None:
    schedule = at_rest()
    for rate in (0.8, 0.1, 0.1):
        schedule.rollout_ended(1.0, rate)
    for _ in range(RULE.burst - 1):
        stretch(schedule, WORSE)
        assert not schedule.rests


def test_training_at_rest_takes_two_percent_of_the_rollouts_by_default() -> None:
    schedule = Schedule(20, begins_at_rest=True)
    schedule.rollout_ended(100.0, None)
    assert schedule.credit == pytest.approx(2.0)


def test_a_change_of_the_task_begins_a_new_interval() -> None:
    schedule = Schedule(20, RULE)
    schedule.rollout_ended(1.0, 0.9)
    schedule.trained(SpotReport(RULE.stretch, 40, 0.1))
    assert schedule.due() is Due.EVALUATE
    schedule.evaluated(BETTER._replace(entries=10, interrupted=True))
    schedule.rollout_ended(1.0, 0.1)
    assert schedule.rollout_ended(1.0, 0.1)
    assert (schedule.micro_batches, schedule.evaluation) == (0, Evaluation())


def test_interrupted_evaluations_add_up() -> None:
    """40 tokens are needed. Two parts of 15 are too few, and with a third one they are enough. All of them decide."""
    schedule = Schedule(20, RULE)
    schedule.trained(SpotReport(RULE.stretch, 40, 0.1))
    part = Evaluation(15, 8.0, 5.0, 3.0, interrupted=True, seconds=0.5)
    assert schedule.evaluated(part) is None
    assert schedule.evaluated(part) is None
    assert schedule.due() is Due.EVALUATE
    assert schedule.evaluated(part._replace(candidate=8.0)) == Evaluation(45, 24.0, 18.0, 9.0, True, 1.5)
    assert schedule.due() is Due.TRAIN
    assert list(schedule.gains) == [pytest.approx(1 / 3)]


def test_acceptance_by_hand() -> None:
    assert Evaluation(11, 22.0, 30.0, 6.0).acceptance == 0.2
    assert Evaluation().acceptance == 0.0


@pytest.mark.parametrize(
    ("in_use", "candidate", "is_published"),
    [
        *((5.0, 4.8, True), (5.0, 4.95, False), (5.0, 5.0, False), (10.0, 0.0, False), (0.0, 0.0, False)),
        *((math.nan, 5.0, False), (5.0, math.nan, False), (math.inf, math.inf, False)),
    ],
)
def test_a_candidate_must_save_two_percent_of_the_rounds(in_use: float, candidate: float, is_published: bool) -> None:
    schedule = Schedule(20)
    assert schedule.publishes(Evaluation(10, in_use, candidate)) == is_published
    schedule.evaluated(Evaluation(100, in_use, candidate))
    assert math.isfinite(*schedule.gains)


def test_a_resumed_run_continues_the_schedule_with_a_new_interval() -> None:
    before = at_rest()
    before.rollout_ended(3.0, 0.7)
    before.rollout_ended(3.0, 0.1)
    before.trained(SpotReport(1, 20, 0.25))
    after = Schedule(20, RULE)
    after.load_state(json.loads(json.dumps(before.state())))
    expected = {"rests": True, "credit": 0.125, "acceptance": 0.7, "low": 1, "gains": [0.0] * 3}
    assert after.state() == before.state() == expected
    assert after.micro_batches == 0


# -- the worker with the newest state ----------------------------------------------------------------------------------


def test_one_worker_trains_and_the_next_continues_from_its_state() -> None:
    newest = NewestState[str]()
    assert newest.pass_to(0) is None, "all begin alike"
    newest.trained(0)
    assert not newest.is_free(1)
    assert newest.is_free(0)
    assert newest.pass_to(0) is None, "its state is the newest"
    newest.taken(0, "first")
    assert newest.pass_to(1) == "first"
    assert newest.pass_to(0) is None, "it has it"
    newest.trained(1)
    newest.taken(1, "second")
    assert [newest.pass_to(worker) for worker in (0, 1, 2)] == ["second", None, "second"]


def test_training_that_is_not_finite_is_dropped() -> None:
    newest = NewestState[str]()
    newest.restart("saved")
    assert [newest.pass_to(worker) for worker in (0, 1, 0)] == ["saved", "saved", None], "none of them has trained"
    newest.trained(0)
    newest.taken(0, None)
    assert newest.pass_to(0) == "saved"


def test_training_of_a_lost_worker_is_lost() -> None:
    newest = NewestState[str]()
    newest.trained(0)
    newest.taken(0, "first")
    assert newest.pass_to(1) == "first"
    newest.trained(1)
    newest.lost(1)
    assert [newest.pass_to(worker) for worker in (0, 1, 2)] == [None, "first", "first"], "a new worker 1 lacks it too"
