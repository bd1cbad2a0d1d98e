"""The drafter's life as a table: what happens, a line at a time, and what it asks for then. No trainer, no worker."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tlt.draft.gate import Judgement, SpotReport, Thresholds, TrainingGate
from tlt.draft.guard import Guard
from tlt.draft.horizon import Horizon, RoundCosts
from tlt.draft.lifecycle import Adopt, Collect, Combine, Forget, Judge, Lifecycle, Publish, Stage, Take

TARGETS = itertools.count()  # versions, each of another rollout
ENTRIES = 40  # of a judgement: 4 micro-batches of 10
BETTER = Judgement(ENTRIES, ENTRIES / 2.0, ENTRIES / 2.5, 0.5 * ENTRIES / 2.5, seconds=4.0)
NO_BETTER = Judgement(ENTRIES, ENTRIES / 2.0, ENTRIES / 2.02, 0.5 * ENTRIES / 2.02, seconds=4.0)
NOT_FINITE = Judgement(ENTRIES, ENTRIES / 2.0, float("nan"), 0.5)
FALLEN = 1.5
FELL = Judgement(ENTRIES, ENTRIES / 1.2, ENTRIES / 1.3, 0.2 * ENTRIES / 1.3, seconds=4.0)
NOTHING = Judgement()
CUT_SHORT = Judgement(broken_off=True)
ROLLOUT = Horizon(10, 100.0, 10.0, 0.1)
HALF = Judgement(ENTRIES // 2, ENTRIES / 4.0, ENTRIES / 5.0, 0.5 * ENTRIES / 5.0, broken_off=True)


class Gate(TrainingGate):
    """What it was told; it trains unless it is at rest."""

    def __init__(self, resting: bool = False, trained: bool = False) -> None:
        thresholds = Thresholds(stretch=4, judged=4, looks=0.02, settled_looks=0.01)
        super().__init__(unroll=2, trained=trained, thresholds=thresholds)
        self.rests, self.told = resting, list[Any]()

    def should_train(self) -> bool:
        return not self.rests

    def fresh(self, accept_length: float) -> bool:
        self.told.append(accept_length)
        return accept_length < FALLEN

    def gained(self, in_use: float, candidate: float, seconds: float, published: bool = False) -> None:
        self.told.append((in_use, candidate, seconds, published))


def life_of(workers: int = 3, resting: bool = False, trained: bool = False) -> Lifecycle:
    return Lifecycle(Gate(resting, trained), workers, micro_batch_tokens=10)


Line = tuple[Any, list[Any]]


def by_0(start: Any = None) -> list[Line]:
    """Worker 0 trains alone, from there."""
    return [
        (("trained", 0, SpotReport(3, 30, 1.0)), []),
        (("idle", [0]), []),  # too little
        (("trained", 0, SpotReport(1, 10, 0.5)), []),
        (("idle", [0]), [Collect([0])]),
        (("idle", [0, 1]), []),  # it is awaited
        (("answered", 0, "replica"), []),
        (("idle", [0, 1]), [Combine(["replica"], start)]),
        (("combined", "mean"), []),
    ]


BY_0 = by_0()
BY_0_AND_2 = [
    (("trained", 0, SpotReport(2, 20, 1.0)), []),
    (("trained", 2, SpotReport(2, 20, 1.0)), []),
    (("idle", [0, 2]), [Collect([0, 2])]),
    (("answered", 0, "a"), []),
    (("idle", [0, 2]), []),
    (("answered", 2, "b"), []),
    (("idle", [0, 2]), [Combine(["a", "b"], None)]),
    (("combined", "mean"), []),
]
TABLES: dict[str, list[Line]] = {
    "what is better is published": [
        *BY_0,
        (("idle", [0, 1]), [Judge([0, 1], "mean")]),
        (("answered", 0, BETTER), []),
        (("answered", 1, None), []),  # its trainer failed
        (("idle", [0, 1]), [Publish(1, "mean", 0.5)]),
        (("idle", [0, 1]), []),
    ],
    "who trained it alone stands there, the others take it once they are to train": [
        *BY_0,
        (("about_to_train", 0), []),
        (("about_to_train", 2), [Adopt(2, "mean")]),
        (("about_to_train", 2), []),
    ],
    "of several, all take the mean": [
        *BY_0_AND_2,
        (("about_to_train", 0), [Adopt(0, "mean")]),
        (("about_to_train", 1), [Adopt(1, "mean")]),
    ],
    "where the target moved away, all forget what was before, whatever else is done": [
        *BY_0,
        (("idle", [0]), [Judge([0], "mean")]),
        (("answered", 0, FELL), []),
        (("idle", [0]), [Forget(range(3)), Publish(1, "mean", pytest.approx(0.2))]),
        *by_0("mean"),
        (("idle", [0]), [Judge([0], "mean")]),
        (("answered", 0, FELL), []),
        (("idle", [0]), [Publish(2, "mean", pytest.approx(0.2))]),  # it was judged on this rollout before
    ],
    "what is not better is not": [
        *BY_0,
        (("idle", [1]), [Judge([1], "mean")]),
        (("answered", 1, NO_BETTER), []),
        (("idle", [1]), []),
    ],
    "nor what is not finite": [
        *BY_0,
        (("idle", [1]), [Judge([1], "mean")]),
        (("answered", 1, NOT_FINITE), []),
        (("idle", [1]), []),
    ],
    "replicas that are not finite make no candidate": [
        *BY_0[:4],
        (("answered", 0, None), []),
        (("idle", [0]), []),
        (("about_to_train", 1), []),
        *BY_0[:4],
    ],
    "a judgement that is broken off is gone on with by who is idle then": [
        *BY_0,
        (("idle", [1]), [Judge([1], "mean")]),
        (("answered", 1, CUT_SHORT), []),
        (("idle", [2]), [Judge([2], "mean")]),
        (("answered", 2, HALF), []),
        (("idle", [0]), [Judge([0], "mean")]),
        (("answered", 0, HALF), []),  # both halves are enough
        (("idle", [0]), [Publish(1, "mean", 0.5)]),
    ],
    "where those who judge have harvested nothing, nothing is known of it": [
        *BY_0,
        (("idle", [0, 1]), [Judge([0, 1], "mean")]),
        (("answered", 0, NOTHING), []),
        (("answered", 1, None), []),
        (("idle", [0, 1]), []),
        *BY_0[:4],  # it is trained on, and judged again
    ],
    "before an update, what was trained goes to whoever is idle next; a whole stretch is judged": [
        (("trained", 0, SpotReport(3, 30, 1.0)), []),
        (("update_begins",), [Collect([0])]),
        (("answered", 0, "a"), []),
        (("idle", [1]), [Combine(["a"], None)]),
        (("combined", "mean"), []),
        (("idle", [1]), []),  # too little to be judged
        (("about_to_train", 0), []),
        (("about_to_train", 1), [Adopt(1, "mean")]),
        (("trained", 1, SpotReport(1, 10, 0.5)), []),
        (("update_begins",), [Collect([1])]),
        (("update_begins",), []),
        (("answered", 1, "b"), []),
        (("idle", [0]), [Combine(["b"], "mean")]),
        (("combined", "more"), []),
        (("idle", [0]), [Judge([0], "more")]),
        (("trained", 1, SpotReport(1, 10, 0.5)), []),
        (("update_begins",), []),  # the candidate comes first
        (("answered", 0, NO_BETTER), []),
        (("idle", [0]), []),
        (("update_begins",), [Collect([1])]),
    ],
    "who has not taken the common start trains for nothing": [
        *BY_0_AND_2,
        (("about_to_train", 0), [Adopt(0, "mean")]),
        (("trained", 2, SpotReport(9, 90, 3.0)), []),  # by a call that was on its way
        (("idle", [1]), [Judge([1], "mean")]),
        (("answered", 1, NO_BETTER), []),
        (("idle", [1]), []),
        (("trained", 0, SpotReport(4, 40, 1.0)), []),
        (("idle", [1]), [Collect([0])]),
    ],
    "what another one trained while a replica was on its way is in no candidate": [
        *BY_0[:5],
        (("trained", 1, SpotReport(2, 20, 1.0)), []),  # from where all began, and not from the mean
        *BY_0[5:],
        (("idle", [0]), [Judge([0], "mean")]),
        (("answered", 0, NO_BETTER), []),
        (("idle", [0]), []),
        (("trained", 0, SpotReport(4, 40, 1.0)), []),
        (("idle", [0]), [Collect([0])]),
    ],
    "with a worker, its candidate is lost; what was asked of others is waited for": [
        *BY_0_AND_2,
        (("idle", [0, 2]), [Judge([0, 2], "mean")]),
        (("lost", 0), []),
        *[(("about_to_train", worker), [Adopt(worker, "mean")]) for worker in (0, 1)],
        *BY_0[:1],
        (("trained", 1, SpotReport(4, 40, 1.0)), []),
        (("idle", [1]), []),
        (("answered", 2, BETTER), []),
        (("idle", [1]), [Collect([0, 1])]),
    ],
    "while replicas are collected, those that are left are enough": [
        *BY_0_AND_2[:3],
        (("lost", 0), []),
        (("idle", [2]), []),
        (("answered", 2, "b"), []),
        (("idle", [2]), [Combine(["b"], None)]),
        (("combined", "mean"), []),
        (("replaced", 0), []),
        *[(("about_to_train", worker), [Adopt(worker, "mean")]) for worker in (0, 2)],
        (("idle", [2]), [Judge([2], "mean")]),
    ],
    "one that was lost after it answered is part of it": [
        *BY_0[:6],
        (("lost", 0), []),
        (("replaced", 0), []),
        (("idle", [1]), [Combine(["replica"], None)]),
        (("combined", "mean"), []),
        (("about_to_train", 0), [Adopt(0, "mean")]),
    ],
    "if nobody is left to answer, the next candidate begins at nothing": [
        *BY_0[:4],
        (("lost", 0), []),
        (("idle", [1]), []),
        (("trained", 1, SpotReport(3, 30, 1.0)), []),
        (("idle", [1]), []),
    ],
    "who was called back before its first micro-batch has nothing to give": [
        (("trained", 0, SpotReport(0, 0, 0.1)), []),
        (("update_begins",), []),
    ],
    "a lost worker's training is in no candidate": [
        (("trained", 0, SpotReport(4, 40, 1.0)), []),
        (("lost", 0), []),
        (("idle", [1]), []),
        (("replaced", 0), []),
    ],
    "a new worker drafts with what is in use, and takes the common start": [
        *BY_0,
        (("idle", [0]), [Judge([0], "mean")]),
        (("answered", 0, BETTER), []),
        (("idle", [0]), [Publish(1, "mean", 0.5)]),
        (("replaced", 0), [Take([0], "mean", 0.5)]),
        (("about_to_train", 0), [Adopt(0, "mean")]),
    ],
    "a resumed run goes on from what was published": [
        (("restored", 7, "saved", 0.4), [Take(range(3), "saved", 0.4)]),
        (("about_to_train", 1), [Adopt(1, "saved")]),
        (("replaced", 1), [Take([1], "saved", 0.4)]),
        (("about_to_train", 0), [Adopt(0, "saved")]),
        *by_0("saved"),
        (("idle", [0]), [Judge([0], "mean")]),
        (("answered", 0, BETTER), []),
        (("idle", [0]), [Publish(8, "mean", 0.5)]),
    ],
}


def run(life: Lifecycle, table: list[Line]) -> None:
    for number, ((event, *arguments), actions) in enumerate(table):
        assert (getattr(life, event)(*arguments) or []) == actions, f"line {number}: {event}"


@pytest.mark.parametrize("name", TABLES)
def test_what_it_asks_for(name: str) -> None:
    run(life_of(), TABLES[name])


def test_idle_time_is_what_was_trained_in_it_up_to_the_next_rollout() -> None:
    """A call may come back late. Of ten idle seconds four were trained in, and two more told of after it began anew;
    what was trained while all were held up took none."""
    life = life_of()
    shares = []
    life.gate.rollout_ended = lambda horizon, costs, trained: shares.append(trained)  # pyright: ignore
    life.trained(0, SpotReport(1, 10, 4.0))
    life.rollout_ends(ROLLOUT)
    life.trained(0, SpotReport(1, 10, 9.0))
    life.held_up(9.0)
    life.trained(0, SpotReport(1, 10, 2.0))
    life.rollout_begins(next(TARGETS))
    life.trained(0, SpotReport(1, 10, 3.0))
    life.rollout_ends(ROLLOUT)
    assert shares == [4.0, 5.0]


def test_a_worker_alone_has_nobody_to_hand_its_training_to() -> None:
    run(life_of(workers=1), [(("trained", 0, SpotReport(3, 30, 1.0)), []), (("update_begins",), []), *by_0()[2:]])


def test_what_the_gate_is_told() -> None:
    life = life_of()
    life.rollout_begins(next(TARGETS))
    run(life, TABLES["what is better is published"])
    run(life, [*by_0("mean"), *TABLES["what is not better is not"][len(BY_0) :]])
    assert life.gate.told == [2.0, (2.0, 2.5, 4.0, True), (2.0, 2.02, 4.0, False)]  # pyright: ignore
    assert life.report.numbers() == {"version": 1.0, "accept_length": 2.0, "candidate": 2.02}
    assert life.tokens == 80
    now = Judgement(ENTRIES, ENTRIES / 2.6, ENTRIES / 2.02, 0.5, seconds=4.0)
    run(life, [*by_0("mean"), (("idle", [0]), [Judge([0], "mean")]), (("answered", 0, now), []), (("idle", [0]), [])])
    assert life.report.numbers()["accept_length"] == pytest.approx(2.6), "of the drafter in use by now"
    life.rollout_begins(next(TARGETS))
    assert life.report.numbers() == {"version": 1.0}


@pytest.mark.parametrize(("trains", "saves"), [(True, 12.5), (False, 0.0)])
def test_the_metrics_say_what_training_is_to_save(trains: bool, saves: float) -> None:
    life = life_of()
    life.rollout_begins(next(TARGETS))
    assert life.numbers() == {"version": 0.0}, "before the first decision"
    life.rollout_ends(ROLLOUT)
    assert life.gate.decision
    life.gate.decision = life.gate.decision._replace(trains=trains, saves=12.5)
    assert life.numbers() == {"version": 0.0, "saves": saves}


@pytest.mark.parametrize(("settled", "every"), [(False, 2), (True, 4)])
def test_a_drafter_at_rest_is_looked_at_once_a_rollout_at_most(settled: bool, every: int) -> None:
    """A look takes 4 s of the workers here, and a rollout 100 s: one rollout in two has one, or one in four where a
    fall would show otherwise, and no more than that after some in which nobody was idle."""
    life, looks = life_of(workers=1, resting=True, trained=settled), []
    life.gate.looks.extend([-1.5] * 8)
    life.gate.costs = [RoundCosts(1.0, 1.0, {2: 1.5})]
    for _ in range(5):
        life.rollout_ends(ROLLOUT)
    for _ in range(9):
        life.rollout_ends(ROLLOUT)
        life.rollout_begins(next(TARGETS))
        looks.append(life.idle([0]) == [Judge([0], None)])
        if looks[-1]:
            life.answered(0, Judgement(10, 5.0, seconds=4.0))
            assert life.idle([0]) == []
    assert looks == [number % every == 0 for number in range(9)]
    assert life.gate.told == [2.0] * sum(looks)  # pyright: ignore
    assert life.version == 0


def test_what_judging_candidates_took_is_not_owed_by_looks() -> None:
    """One that comes to rest is looked at in the next rollout, however much was judged before."""
    life = life_of()
    run(life, [*BY_0, (("idle", [0]), [Judge([0], "mean")])])
    run(life, [(("answered", 0, NO_BETTER._replace(seconds=1000.0)), []), (("idle", [0]), [])])
    life.gate.rests = True  # pyright: ignore
    life.rollout_ends(ROLLOUT)
    life.rollout_begins(next(TARGETS))
    assert life.idle([0]) == [Judge([0], None)]


def test_what_was_looked_at_is_not_looked_at_again() -> None:
    """Idle time that comes again and again while the target stays has the same harvest: copies would say nothing."""
    life = life_of(workers=1, resting=True)
    asked = []
    for target in (0, 0, 0, 1):
        life.rollout_ends(ROLLOUT)
        life.rollout_begins(target)
        asked.append(life.idle([0]))
        if asked[-1]:
            life.answered(0, BETTER)
            assert life.idle([0]) == []
    assert asked == [[Judge([0], None)], [], [], [Judge([0], None)]]
    assert life.gate.told == [2.0] * 2  # pyright: ignore


@pytest.mark.parametrize("resting", [True, False])
def test_one_that_is_suddenly_of_little_use_is_looked_at_in_the_next_rollout(resting: bool) -> None:
    """Whatever looks have taken so far, and whether it is trained or not; but once a rollout."""
    life = life_of(workers=1, resting=resting)
    life.rollout_begins(next(TARGETS))
    assert life.idle([0]) == []
    life.gate.surprised = True
    assert life.idle([0]) == [Judge([0], None)]
    life.answered(0, NO_BETTER)
    assert life.idle([0]) == []


def test_what_was_judged_in_this_rollout_is_not_looked_at() -> None:
    life = life_of()
    run(life, [*BY_0, (("idle", [0]), [Judge([0], "mean")]), (("answered", 0, NO_BETTER), []), (("idle", [0]), [])])
    life.gate.surprised = True
    assert life.idle([0]) == []
    life.rollout_begins(next(TARGETS))
    assert life.idle([0]) == [Judge([0], None)]


def test_a_look_that_the_next_rollout_overtakes_is_none() -> None:
    """It would be of the rollout before. What worker 0 says of it then is of no use, and the next look is asked for."""
    life = life_of(resting=True)
    life.rollout_ends(ROLLOUT)
    life.rollout_begins(0)
    assert life.idle([0]) == [Judge([0], None)]
    life.rollout_ends(ROLLOUT)
    life.rollout_begins(1)
    assert life.idle([1]) == []
    owed = life._looking
    life.answered(0, FELL)
    assert life.idle([1]) == [Judge([1], None)]
    assert life._looking == owed + FELL.seconds, "it took its time all the same"
    life.answered(1, NO_BETTER)
    assert life.idle([1]) == []
    assert life.gate.told == [2.0]  # pyright: ignore


def test_a_candidate_judged_too_late_may_go_live_but_is_no_look() -> None:
    life = life_of()
    life.rollout_begins(0)
    run(life, [*BY_0, (("idle", [0]), [Judge([0], "mean")])])
    life.rollout_begins(1)
    life.answered(0, BETTER)
    assert life.idle([0]) == [Publish(1, "mean", 0.5)]
    assert life.gate.told == [(2.0, 2.5, 4.0, True)]  # pyright: ignore
    assert life.report.accept_length is None, "of this rollout"
    life.gate.surprised = True
    assert life.idle([0]) == [Judge([0], None)]


def test_training_that_is_not_finite_begins_again_for_all_where_the_drafter_in_use_stands() -> None:
    """Its replicas are trained from there: the average of those before is the start of none."""
    life = life_of()
    life.restored(3, "in use", 0.5)
    for worker in (0, 1, 2):
        assert life.about_to_train(worker) == [Adopt(worker, "in use")]
    run(life, [*by_0("in use"), (("idle", [0]), [Judge([0], "mean")]), (("answered", 0, NO_BETTER), [])])
    assert life.idle([0]) == []
    run(life, [(("trained", 0, SpotReport(4, 40, 1.0)), []), (("idle", [0]), [Collect([0])])])
    run(life, [(("answered", 0, None), []), (("idle", [0]), [])])
    assert life.about_to_train(1) == [Adopt(1, "in use")]
    run(life, [(("trained", 1, SpotReport(4, 40, 1.0)), []), (("idle", [1]), [Collect([1])])])
    run(life, [(("answered", 1, "b"), []), (("idle", [1]), [Combine(["b"], "in use")])])


def test_nobody_looks_at_one_that_is_trained() -> None:
    life = life_of()
    life.rollout_ends(ROLLOUT)
    life.rollout_begins(next(TARGETS))
    assert life.idle([0]) == []


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_it_ends_at_rest_and_asks_only_those_who_are_idle(seed: int) -> None:
    """Any events in any order, as workers that come and go would send them."""
    life, chance, busy = life_of(resting=seed % 2 == 1), random.Random(seed), dict[int, Any]()

    def carry_out(actions: Any, idle: list[int]) -> None:
        for action in actions:
            if isinstance(action, Judge):
                assert set(action.workers) <= set(idle)
            if isinstance(action, Collect | Judge):
                assert not busy
                busy.update(dict.fromkeys(action.workers, action))
            elif isinstance(action, Combine):
                life.combined("mean")

    for _ in range(300):
        worker = chance.randrange(3)
        event = chance.choice(["trained", "idle", "answered", "lost", "rollout", "about_to_train", "update"])
        idle = [index for index in range(3) if index not in busy]
        if event == "trained":
            life.trained(worker, SpotReport(chance.randrange(3), 10, 0.1))
        elif event == "idle" and idle:
            carry_out(life.idle(idle), idle)
        elif event == "answered" and worker in busy:
            asked = busy.pop(worker)
            said = chance.choice([BETTER, NO_BETTER, NOTHING, HALF, CUT_SHORT]) if isinstance(asked, Judge) else ["it"]
            life.answered(worker, chance.choice([said, said, None]))
        elif event == "lost" and chance.random() < 0.2:
            busy.pop(worker, None)
            life.lost(worker)
            carry_out(life.replaced(worker), idle)
        elif event == "rollout" and not busy:
            life.rollout_ends(ROLLOUT)
            life.rollout_begins(next(TARGETS))
        elif event == "update" and not busy:
            carry_out(life.update_begins(), idle)
        elif event == "about_to_train" and worker not in busy:
            carry_out(life.about_to_train(worker), idle)
    for worker in list(busy):
        life.answered(worker, BETTER if isinstance(busy.pop(worker), Judge) else None)
    life._micro_batches = 0
    while actions := life.idle([0, 1, 2]):
        carry_out(actions, [0, 1, 2])
        for worker in list(busy):
            life.answered(worker, BETTER if isinstance(busy.pop(worker), Judge) else None)
    assert life.stage == Stage.TRAINING


def test_a_guard_lets_go_of_what_has_failed_and_passes_on_what_is_not_its_own() -> None:
    guard = Guard([1], passes_on=(KeyError,))
    assert guard(lambda it: it[0], 9) == 1
    with pytest.raises(KeyError):
        guard.tell(lambda it: {}["no"])
    assert guard(lambda it: it[0], 9) == 1
    assert guard(lambda it: it[5], 9) == 9
    assert guard.inside is None
    assert guard(lambda it: it[0], 9) == 9
    assert Guard[int](None)(lambda it: it, 3) == 3


def test_the_state_comes_back() -> None:
    life = life_of()
    run(life, TABLES["what is better is published"])
    other = life_of()
    other.load_state(life.state())
    assert other.gate.state() == life.gate.state()
    other.load_state({})
    assert other.gate.state() == life.gate.state(), "of a run whose training had failed"


def test_looks_may_take_their_share_of_all_workers_seconds() -> None:
    """2 % of three times 100 s a rollout, and a look takes 10."""
    life, looks = life_of(workers=3, resting=True), []
    for _ in range(4):
        life.rollout_ends(ROLLOUT)
        life.rollout_begins(next(TARGETS))
        looks.append(life.idle([0]) == [Judge([0], None)])
        if looks[-1]:
            life.answered(0, Judgement(10, 5.0, seconds=10.0))
            assert life.idle([0]) == []
    assert looks == [True, True, False, True]


def test_a_new_worker_takes_the_common_start_although_nothing_was_published() -> None:
    table = [*BY_0, (("about_to_train", 1), [Adopt(1, "mean")]), (("lost", 1), []), (("replaced", 1), [])]
    run(life_of(), [*table, (("about_to_train", 1), [Adopt(1, "mean")])])


def test_a_candidate_that_is_not_finite_is_not_reported() -> None:
    life = life_of()
    life.rollout_begins(next(TARGETS))
    run(life, TABLES["nor what is not finite"])
    assert life.report.numbers() == {"version": 0.0, "accept_length": 2.0}
