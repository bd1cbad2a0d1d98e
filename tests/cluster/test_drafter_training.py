"""Idle workers train a drafter from random weights and publish it. No token changes, whatever fails."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pools import TestPool, ThreadWorker
from test_coordinator import config_of as two_workers
from test_coordinator import train as run

from tlt.build import starting_drafter
from tlt.cluster.drafter_training import DrafterTraining
from tlt.cluster.idle import IdleWork
from tlt.cluster.pool import ClusterError, LocalPool
from tlt.cluster.supervisor import Done, Supervisor
from tlt.config import Config
from tlt.draft.strategy import Strategy
from tlt.engine.tuner import Fixed
from tlt.metrics import read_metrics
from tlt.models.families import decoder_options, read_config
from tlt.spot import schedule as schedules
from tlt.spot.saving import load_latest, weights_of
from tlt.spot.schedule import RULE, Evaluation, Schedule, SpotReport
from tlt.spot.spot import SpotTrainer
from tlt.trace import Tracer

SHORT, LONG = (3, 40, 5), (4, 40, 6)
"""prompts a step, tokens a response, steps; a long run has enough training data in each rollout, and publishes more"""


@pytest.fixture(scope="module", autouse=True)
def _no_crowding() -> Iterator[None]:
    """Train also if other programs of this machine take cores."""
    with patch("tlt.cluster.idle._CROWDED", math.inf):
        yield


def config_of(home: Path, drafter: str, size: tuple[int, int, int] = SHORT, **training: Any) -> Config:
    prompts, tokens, steps = size
    training = {"micro_batch_tokens": 32, "unroll": 2, "learning_rate": 3e-2} | training
    return two_workers(
        home,
        2,
        rollout={"prompts_per_step": prompts, "max_new_tokens": tokens},
        speculation={"drafter": drafter, "window": 16, "training": training},
        train={"steps": steps, "updates_per_step": 1},
    )


def rule(**changed: Any) -> Any:
    changes = {"stretch": 2, "burst": 10**9} | changed
    return patch.object(schedules, "RULE", replace(RULE, **changes))


def train(config: Config, loses: Any = lambda i, m: "", **changed: Any) -> tuple[str, DrafterTraining, TestPool]:
    """Return the policy's sha256, the driver of the drafter training, and the pool. `changed` are constants to
    replace."""
    made: list[DrafterTraining] = []

    def noted(*arguments: Any) -> DrafterTraining:
        made.append(DrafterTraining(*arguments))
        return made[0]

    order = itertools.count()  # in turn: one that trains and trains must not keep the other from decoding
    learned = Fixed(Strategy("eagle", 3))
    with (
        patch("tlt.cluster.drafter_training.DrafterTraining", noted),
        patch("tlt.engine.own_backend.make_tuner", lambda *arguments: learned),
        rule(**changed),
    ):
        digest, _, pool = run(config, lambda n: next(order), loses)
    return digest, made[0], pool


@pytest.fixture(scope="module")
def plain(home: Path) -> str:
    return train(config_of(home, "off"))[0]


@pytest.fixture(scope="module")
def plain_long(home: Path) -> str:
    return train(config_of(home, "off", LONG))[0]


class Calls:
    """Supervisor that records the calls to its workers."""

    def __init__(self, workers: int = 3) -> None:
        self.present, self.size, self.pool = list(range(workers)), workers, LocalPool(None)
        self.made: list[tuple[Any, ...]] = []

    def free(self) -> list[int]:
        return self.present

    def call(self, index: int, method: str, *arguments: Any) -> None:
        self.made.append((index, method, *arguments))

    def done(self) -> list[Done]:
        return []

    def taken(self) -> list[tuple[Any, ...]]:
        made, self.made = self.made, []
        return made


def training_of(config: Config, workers: int = 3) -> Any:
    """Return the driver of a training that is always due, with `Calls` as its supervisor."""
    options = decoder_options(read_config(config.model.path))
    training = DrafterTraining(Calls(workers), config, options, starting_drafter(config, options))
    training.schedule.credit = 1e9
    return training


@pytest.fixture
def training(home: Path) -> Any:
    return training_of(config_of(home, "adaptive"))


def train_on(training: Any, worker: int, micro_batches: int = 1) -> None:
    """Let a worker train, and forget the calls so far."""
    training.next_call(worker, [worker], 0.5)
    training.handle_result(Done(worker, "train_drafter", SpotReport(micro_batches, 32, 0.1)))
    training.supervisor.taken()


BETTER = Done(2, "evaluate_drafter", Evaluation(100, 50.0, 40.0, 30.0))
STATE = {"mean.a": torch.ones(1)}


@pytest.fixture(scope="module")
def published(home: Path) -> tuple[str, DrafterTraining, TestPool]:
    """Return the results of a run that trained and published drafters. Tests do not change them."""
    evaluate = ThreadWorker.evaluate_drafter

    def watched(self: ThreadWorker, *arguments: Any) -> Any:
        assert not self.engine.busy, "workers that decode are left alone"
        return evaluate(self, *arguments)

    with patch.object(ThreadWorker, "evaluate_drafter", watched):
        found = train(config_of(home, "adaptive"))
    (home / "run").rename(home / "published")
    found[1].folder = home / "published" / "drafter"
    return found


def test_idle_workers_train_and_publish(home: Path, published: tuple[str, Any, TestPool], plain: str) -> None:
    digest, training, pool = published
    assert digest == plain
    assert training.version > 0
    saved = load_latest(training.folder, training.target)
    assert saved
    assert saved.number == training.version
    assert training.in_use
    for worker in pool.workers:
        assert worker.engine.drafters.usable["eagle"].acceptance_rate > 0  # the last one may not be everywhere
    weight = weights_of(saved.state)["fc.weight"]
    used = [worker.spot.trainer.in_use.fc.weight for worker in pool.workers]
    assert any(torch.equal(mine.to(weight.dtype), weight) for mine in used), "what was saved is what was published"
    lines = [line["rollout"] for line in read_metrics(home / "published")]
    assert {line["spot"]["rests"] for line in lines} == {0.0}
    assert any(line["spot"].get("candidate", 0.0) > 1.0 for line in lines)
    assert all(line["spot_seconds"] == 0.0 for line in lines), "no step is delayed"
    trained: set[int] = set()
    for worker, method in pool.log:
        assert method != "drafter_state" or worker in trained, "only of one that trained, or evaluated"
        trained |= {worker} if method in ("train_drafter", "evaluate_drafter") else set()


@pytest.mark.parametrize("rate", [None, 0.4])
def test_a_run_with_a_trained_drafter_begins_at_rest(home: Path, rate: float | None) -> None:
    config = config_of(home, "adaptive")
    layer = starting_drafter(config, options := decoder_options(read_config(config.model.path)))
    assert layer
    layer.acceptance_rate = rate
    training = DrafterTraining(Calls(), config, options, layer)
    assert training.schedule.rests == training.report()["rests"] == (rate is not None)


@pytest.mark.parametrize("changed", ["nothing", "the files are damaged", "the recipe's drafter has another window"])
def test_resumed_runs_use_the_published_drafter(home: Path, tmp_path: Path, published: Any, changed: str) -> None:
    """If no drafter can be used, later ones have higher numbers, because the saver keeps the highest."""
    before, config = published[1], config_of(home, "adaptive")
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(tmp_path)})})
    shutil.copytree(before.folder, tmp_path / "drafter")
    for file in tmp_path.glob("drafter/*/model.safetensors") if "damaged" in changed else ():
        file.write_bytes(b"")
    if "window" in changed:
        config = config.model_copy(update={"speculation": config.speculation.model_copy(update={"window": 8})})
    after = training_of(config, workers=2)
    after.load_state(json.loads(json.dumps(before.state())))
    assert after.version == before.version > 0
    if "window" not in changed:
        assert after.schedule.state() == before.schedule.state()
    made = [call[:2] for call in after.supervisor.taken()]
    assert made == [(0, "take_drafter"), (1, "take_drafter")] * (changed == "nothing")
    assert after.report()["version"] == (after.version if changed == "nothing" else 0.0)
    if changed == "nothing":
        assert before.in_use
        assert after.in_use
        assert after.in_use[1] == before.in_use[1], "its acceptance rate"
        assert after.newest.pass_to(0) == after.newest.pass_to(1) == after.in_use[0], "training goes on from there"


def test_the_next_idle_worker_continues_the_training_of_another(home: Path, plain: str) -> None:
    """The training is far too short for a candidate. One worker trains at a time."""
    steps: list[tuple[float, float]] = []  # before and after each call
    real = SpotTrainer.train

    def watched(self: SpotTrainer, *arguments: Any) -> Any:
        before = self.trainer.steps
        report = real(self, *arguments)
        steps.append((before, self.trainer.steps))
        return report

    with patch.object(SpotTrainer, "train", watched):
        digest, training, pool = train(config_of(home, "adaptive"), stretch=10_000)
    assert digest == plain
    assert training.version == 0
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(steps)), "one chain of steps"
    assert len({worker for worker, method in pool.log if method == "train_drafter"}) == 2
    logged = sum(line["rollout"]["drafter_tokens"] for line in read_metrics(home / "run"))
    assert 0 < logged <= 32 * steps[-1][1]
    assert logged + training.take_tokens() > 0


def test_training_may_delay_a_step_by_its_share(home: Path, plain_long: str) -> None:
    """A worker trains between a rollout and the update, also on data of that rollout. One worker is lost then."""
    lost, asked, ages = list[int](), list[float](), set[int]()
    evaluate, train_longer = ThreadWorker.evaluate_drafter, IdleWork.train_longer

    def loses_one(worker: int, method: str) -> str:
        if method != "train_drafter" or lost or len(asked) < 3:
            return ""
        lost.append(worker)
        return "before"

    def evaluated(self: ThreadWorker, *arguments: Any) -> Any:
        assert self.spot.trainer
        ages.update(self.target.version - item.target_version for item in self.spot.trainer.buffer.latest)
        return evaluate(self, *arguments)

    def longer(idle: IdleWork, seconds: float) -> float:
        """Let the extra time last 30 turns of the driver, so that an evaluation fits in on a busy machine too."""
        asked.append(seconds)
        turns = itertools.count()
        with patch("tlt.cluster.idle.time", SimpleNamespace(monotonic=lambda: next(turns) * seconds / 30)):
            return train_longer(idle, seconds)

    extra = patch.object(IdleWork, "train_longer", longer)
    with extra, patch.object(ThreadWorker, "evaluate_drafter", evaluated):
        digest, training, _ = train(config_of(home, "adaptive", LONG, extra=1.0), loses_one)
    assert digest == plain_long
    assert training.version > 0
    assert 0 in ages, "held-out data are of the rollout that has just ended"
    lines = [line["rollout"] for line in read_metrics(home / "run")]
    assert all(line["spot_seconds"] >= seconds for line, seconds in zip(lines[2:], asked[2:], strict=True))
    assert len(lost) == 1


def train_for(training: Any, home: Path, left: Iterator[float]) -> list[tuple[Any, ...]]:
    """Train between rollouts. Return the calls that were made."""
    rows: Any = SimpleNamespace(slots=1)
    idle = IdleWork(training.supervisor, rows, [Tracer()] * 3, config_of(home, "adaptive"), training)
    idle.slice_seconds = 0.5
    idle.train_for(lambda: next(left))
    return training.supervisor.taken()


def test_training_at_rest_delays_nothing(training: Any, home: Path) -> None:
    training.schedule.rests, training.schedule.credit = True, 0.0
    assert train_for(training, home, iter([9.0])) == []


def test_the_last_call_is_as_short_as_the_time_left(training: Any, home: Path) -> None:
    assert train_for(training, home, iter([0.2, 0.0])) == [(0, "train_drafter", None, 0.2)]


def test_all_workers_drop_older_data_after_a_change_of_the_task(training: Any) -> None:
    for acceptance in (0.9, 0.1, 0.9, 0.1):
        training.rollout_ended(1.0, acceptance)
    assert training.supervisor.taken() == []
    training.rollout_ended(1.0, 0.1)
    assert training.supervisor.taken() == [(worker, "forget_older_data") for worker in range(3)]


def test_the_training_state_moves_from_a_decoding_worker_to_an_idle_one(training: Any) -> None:
    calls = training.supervisor
    assert training.next_call(0, [0], 0.5)
    assert calls.taken() == [(0, "train_drafter", None, 0.5)]
    assert not training.next_call(1, [0, 1], 0.5), "one at a time"
    training.handle_result(Done(0, "decode", None))
    assert training.under_way == 0, "a call of another kind has returned"
    training.handle_result(Done(0, "train_drafter", SpotReport(1, 32, 0.1)))
    assert not training.next_call(1, [0, 1], 0.5), "the one that trains is idle too"
    assert calls.taken() == []
    assert not training.next_call(1, [1], 0.5)
    assert calls.taken() == [(0, "drafter_state")], "it has got something to decode"
    training.handle_result(Done(0, "drafter_state", STATE))
    assert training.next_call(1, [1], 0.5)
    assert calls.taken() == [(1, "train_drafter", STATE, 0.5)]


def test_a_worker_with_too_little_data_trains_in_the_next_rollout(training: Any) -> None:
    training.next_call(0, [0, 1], 0.5)
    training.handle_result(Done(0, "train_drafter", None))
    assert not training.next_call(0, [0, 1], 0.5)
    assert training.next_call(1, [0, 1], 0.5), "another one may have more"
    training.handle_result(Done(1, "train_drafter", None))
    training.rollout_ended(1.0, None)
    assert training.next_call(0, [0, 1], 0.5)


def test_a_candidate_is_published_to_all_present_workers(training: Any) -> None:
    calls = training.supervisor
    calls.present = [0, 2]
    training.saver = SimpleNamespace(save=lambda *saved: calls.made.append(("saved", *saved)))
    train_on(training, 2, RULE.stretch)
    assert training.next_call(2, [2], 0.5)
    assert calls.taken() == [(2, "evaluate_drafter", None)]
    training.handle_result(BETTER)
    assert calls.taken() == [(2, "drafter_state")]
    training.handle_result(Done(2, "drafter_state", STATE))
    published = [(worker, "take_drafter", STATE, 0.75) for worker in calls.present]
    assert calls.taken() == [*published, ("saved", 1, STATE, 0.75)]
    assert training.report() == {"version": 1.0, "rests": 0.0, "accept_length": 2.0, "candidate": 2.5}
    assert training.report() == {"version": 1.0, "rests": 0.0}, "of the next rollout"
    training.handle_result(Done(1, "take_state", None))
    assert calls.taken() == [(1, "take_drafter", STATE, 0.75)], "a new worker"
    training.handle_result(Done(2, "drafter_state", STATE))
    assert calls.taken() == [], "this state was not evaluated"


def test_the_state_is_fetched_before_an_update_unless_a_call_is_under_way(training: Any) -> None:
    train_on(training, 0)
    training.update_begins()
    assert training.supervisor.taken() == [(0, "drafter_state")]
    training.update_begins()
    assert training.supervisor.taken() == []


def test_a_holder_with_too_little_data_hands_on_its_state(training: Any) -> None:
    """The state is not finite, so the stretch begins again."""
    train_on(training, 0)
    training.next_call(0, [0], 0.5)
    training.handle_result(Done(0, "train_drafter", None))
    training.supervisor.taken()
    assert not training.next_call(1, [0, 1], 0.5)
    assert training.supervisor.taken() == [(0, "drafter_state")]
    training.handle_result(Done(0, "drafter_state", None))
    assert training.schedule.micro_batches == 0
    assert training.next_call(1, [0, 1], 0.5)


def test_the_whole_evaluation_decides_about_a_publication(training: Any) -> None:
    """The candidate is better in the last part only."""
    worse = Evaluation(1, 100.0, 120.0, 30.0, interrupted=True)
    training.handle_result(Done(2, "evaluate_drafter", worse))
    training.handle_result(BETTER)
    assert training.supervisor.taken() == []


@pytest.mark.parametrize("is_asked", [True, False])
def test_the_candidate_of_a_lost_worker_is_not_published(training: Any, is_asked: bool) -> None:
    """It is lost before or after its state is requested, and another worker sends its own."""
    train_on(training, 2, RULE.stretch)
    training.next_call(2, [2], 0.5)
    training.supervisor.present = [0, 1, 2] if is_asked else [0, 1]
    training.handle_result(BETTER)
    assert ((2, "drafter_state") in training.supervisor.taken()) == is_asked
    if is_asked:
        training.handle_result(Done(2, "drafter_state", None, lost=True))
    training.handle_result(Done(0, "drafter_state", STATE))
    assert training.supervisor.taken() == []
    assert (training.version, training.in_use) == (0, None)


def test_the_state_of_a_replacement_is_not_that_of_the_lost_worker(training: Any) -> None:
    """Another worker asks for the state of worker 0, before the driver has handled the loss of worker 0."""
    train_on(training, 0)
    assert not training.next_call(1, [1], 0.5)
    assert training.supervisor.taken() == [(0, "drafter_state")]
    training.handle_result(Done(0, "state", None, lost=True))
    training.handle_result(Done(0, "drafter_state", STATE))
    assert training.next_call(1, [1], 0.5)
    assert training.supervisor.taken() == [(1, "train_drafter", None, 0.5)]


def test_the_training_of_a_lost_worker_is_lost(training: Any) -> None:
    train_on(training, 0, RULE.stretch - 1)
    training.next_call(0, [0], 0.5)
    training.handle_result(Done(0, "train_drafter", None, lost=True))
    assert training.schedule.micro_batches == 0
    assert training.next_call(1, [1], 0.5)


def schedule_fails(method: str, error: type[Exception] = ZeroDivisionError) -> Any:
    return patch.object(Schedule, method, side_effect=error("in the schedule"))


@pytest.mark.parametrize("method", ["due", "trained", "evaluated", "rollout_ended", "state"])
def test_a_failing_schedule_is_not_used_again(training: Any, method: str) -> None:
    with schedule_fails(method):
        train_on(training, 2, RULE.stretch)
        training.next_call(2, [2], 0.5)
        training.handle_result(BETTER)
        training.rollout_ended(1.0, None)
        training.state()
    assert not training.is_on
    training.supervisor.taken()
    assert not training.next_call(0, [0], 0.5)
    assert training.supervisor.taken() == []


def test_errors_of_the_cluster_do_not_turn_training_off(training: Any) -> None:
    with schedule_fails("trained", ClusterError), pytest.raises(ClusterError):
        train_on(training, 0)
    assert training.is_on


def test_a_worker_that_hangs_in_an_evaluation_is_replaced() -> None:
    pool: Any = TestPool(2, lambda index: None)
    pool.wait = lambda handles, timeout: []
    supervisor = Supervisor(pool)
    supervisor.call(1, "evaluate_drafter", None)
    supervisor.call(0, "train_drafter", 0.0)
    supervisor.wait_until_ended(("evaluate_drafter",), patience=-1.0)
    assert supervisor.losses == 1
    assert [(done.worker, done.method, done.lost) for done in supervisor.take_kept()] == [(1, "evaluate_drafter", True)]
    assert supervisor.calls.of_worker(1) == ["take_state"]
    assert supervisor.calls.of_worker(0) == ["train_drafter", "state"]


def test_a_worker_lost_in_a_publication(home: Path, plain_long: str) -> None:
    calls = itertools.count()

    def loses(worker: int, called: str) -> str:
        return "after" if called == "drafter_state" and next(calls) == 0 else ""

    digest, training, pool = train(config_of(home, "adaptive", LONG), loses, better=1.0, stretch=1)  # much is published
    assert digest == plain_long
    assert next(calls) > 1
    assert training.is_on
    assert sum(m == "take_state" for _, m in pool.log) == 1


@pytest.mark.parametrize("method", ["publish", "harvest"])
def test_a_failing_trainer_only_costs_speed(home: Path, plain: str, method: str) -> None:
    with patch.object(SpotTrainer, method, side_effect=RuntimeError("out of memory")):
        digest, training, pool = train(config_of(home, "adaptive"))
    assert digest == plain
    assert training.version == (method == "publish"), "that is the last one"
    assert not all(worker.spot.trainer for worker in pool.workers)
