"""Idle workers train a drafter from nothing, and it goes live: not one token changes, whatever fails on the way."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pools import TestPool, ThreadWorker
from rich.console import Console
from tiny import tiny_config

from tlt import run as run_module
from tlt.cluster.balance import Beside
from tlt.cluster.coordinator import Coordinator
from tlt.cluster.crew import Crew
from tlt.cluster.pool import ClusterError, Handle
from tlt.cluster.publication import Publication, Shared
from tlt.cluster.remote import ClusterRollout, join
from tlt.cluster.share import Share
from tlt.config import Config
from tlt.display import Display
from tlt.draft import gate as gates
from tlt.draft.average import Replica
from tlt.draft.gate import Judgement, TrainingGate, summed
from tlt.draft.horizon import Horizon, RoundCosts
from tlt.draft.lifecycle import Collect, Combine, Stage
from tlt.draft.saving import load_latest
from tlt.draft.spot import SpotTrainer
from tlt.draft.strategy import Strategy
from tlt.engine.tuner import Fixed
from tlt.metrics import read_metrics
from tlt.trace import ROLLOUT, Tracer
from tlt.types import Prompt, Request, Response, RolloutStats, Row, SamplingParams


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def config_of(home: Path, drafter: str) -> Config:
    return tiny_config(
        home,
        reward={"name": "tiny_rewards:share_of_low_bytes", "folder": str(Path(__file__).parent.parent)},
        rollout={"stop_strings": list("abcdefghij "), "prompts_per_step": 4, "max_new_tokens": 40},
        speculation={
            "drafter": drafter,
            "window": 16,
            "training": {"micro_batch_tokens": 32, "unroll": 2, "learning_rate": 3e-2},
        },
        cluster={"workers": 2, "slice_seconds": 1e-9},
        train={"steps": 8, "learning_rate": 1e-3, "micro_batch_tokens": 64},
        run={"folder": str(home / "run"), "overwrite": True, "seed": 1},
    )


def thresholds(**changed: Any) -> Any:
    return patch.object(gates, "THRESHOLDS", replace(gates.THRESHOLDS, **changed))


def always(gate: TrainingGate) -> bool:
    return True


def train(
    config: Config, loses: Any = lambda i, m: "", should_train: Any = always, **changed: Any
) -> tuple[str, Publication, TestPool]:
    """With what publishes if it worked to the end; the pool's `guard` is what stood around that."""
    found: list[Any] = []

    def many_workers(config: Config, folder: str | Path) -> Any:
        turns = itertools.count()  # in turn: one that trains and trains must not keep the other from decoding
        pool = TestPool(2, lambda i: ThreadWorker(config, i, folder), lambda n: next(turns), loses)
        rollout, policy = join(pool, config)
        assert isinstance(rollout, ClusterRollout)
        pool.guard = rollout.coordinator.drafter  # pyright: ignore
        pool.coordinator = rollout.coordinator  # pyright: ignore
        found.extend([rollout.coordinator.drafter.inside, pool])
        return rollout, policy

    learned = Strategy("eagle", 3, 2, 6)  # without a profile at start-up
    with (
        patch("tlt.parts._many_workers", many_workers),
        patch("tlt.build.make_tuner", lambda *arguments: Fixed(learned)),
        thresholds(**{"stretch": 2} | changed),
        patch.object(TrainingGate, "should_train", should_train),
        patch.object(TrainingGate, "saves", lambda gate, seconds: 1e9 * seconds),
    ):
        summary = run_module.train(config, False, Display(Console(quiet=True)))
    return summary["policy_sha256"], found[0], found[1]


@pytest.fixture(scope="module")
def plain(home: Path) -> str:
    return train(config_of(home, "off"))[0]


def traced(home: Path) -> list[dict[str, Any]]:
    return json.loads((home / "run" / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def test_idle_workers_train_and_publish(home: Path, plain: str) -> None:
    digest, published, pool = train(config_of(home, "adaptive"))
    assert digest == plain
    assert published.life.version > 0
    assert load_latest(published.folder, published.options).number == published.life.version
    assert published.life.in_use is not None
    decisions = [event["args"] for event in traced(home) if event["name"] in ("drafter trains", "drafter rests")]
    assert len(decisions) >= 4, "one a rollout"
    assert {"saves", "seconds", "agreement", "speed", "speed_trained", "steps", "second_costs"} <= set(decisions[0])
    for worker in pool.workers:
        drafter = worker.engine.drafters.usable["eagle"]
        assert drafter.agreement > 0  # it was 0; the very last publication may not be everywhere yet


@pytest.mark.parametrize("damaged", [False, True])
def test_what_follows_a_run_whose_training_failed_goes_on_from_its_drafter(home: Path, damaged: bool) -> None:
    """There is nothing of the drafter in its checkpoint. Where no drafter can be read, later ones have higher numbers:
    the saver keeps those."""
    config = config_of(home, "adaptive")
    _, before, pool = train(config)
    for file in before.folder.glob("*/model.safetensors") if damaged else ():
        file.write_bytes(b"")
    after = Publication(pool.coordinator.crew, config)  # pyright: ignore
    with patch.object(Publication, "do") as do:
        after.load_state({})
    assert after.life.version == before.life.version > 0
    assert do.called != damaged
    assert (after.life.in_use is None) == damaged
    if after.life.in_use and before.life.in_use:
        assert after.life.in_use[1] == before.life.in_use[1], "its agreement"
    if after.life.in_use and before.life.in_use:
        assert after.life.in_use[1] == before.life.in_use[1], "its agreement"


def test_a_run_that_trains_none_says_nothing_of_the_drafter_of_one_that_goes_on_from_it(home: Path) -> None:
    """That one may be trained: it is not random because there was none before."""
    config, crew = config_of(home, "off"), SimpleNamespace(size=2, present=[0, 1])
    trains_none = Publication(crew, config)  # pyright: ignore
    assert not trains_none.trains
    assert trains_none.state() == {}


def test_whoever_is_idle_next_goes_on_with_what_another_trained(home: Path, plain: str) -> None:
    """Although it is by far too little for a candidate."""
    ends: dict[int, float] = {}  # by trainer: micro-batches behind its weights
    taken_over = []
    real = SpotTrainer.train

    def watched(self: SpotTrainer, *arguments: Any) -> Any:
        taken_over.append(self.trainer.steps > ends.get(id(self), 0.0))
        report = real(self, *arguments)
        ends[id(self)] = self.trainer.steps
        return report

    with patch.object(SpotTrainer, "train", watched):
        digest, published, pool = train(config_of(home, "adaptive"), stretch=10_000)
    assert digest == plain
    assert published.life.version == 0
    assert any(taken_over)
    told = sum(line["rollout"]["drafter_tokens"] for line in read_metrics(home / "run"))
    assert 0 < told == pool.coordinator._trained, "also what came back behind a rollout"


# -- catching up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loses", [False, True])
def test_a_drafter_that_is_far_behind_holds_up_a_step(home: Path, plain: str, loses: bool) -> None:
    """All workers train between a rollout and the update, which is on record, and no token depends on it; one of them
    may be lost amid it."""
    begun: list[float] = []
    lost: list[int] = []

    def catch_up(gate: TrainingGate, most: float) -> float:
        begun.append(most)
        return 0.1

    def loses_one(worker: int, method: str) -> str:
        if not loses or method != "spot" or lost or len(begun) < 3:
            return ""
        lost.append(worker)
        return "before"

    ages: set[int] = set()
    judge = ThreadWorker.judge

    def judged(self: ThreadWorker, *arguments: Any) -> Any:
        ages.update(self.target.version - item.target_version for item in self.trainer.inside.buffer.latest)
        return judge(self, *arguments)

    paid: list[float] = []
    with (
        patch.object(TrainingGate, "catch_up", catch_up),
        patch.object(TrainingGate, "held_up", lambda gate, seconds, trained: paid.append(seconds)),
        patch.object(ThreadWorker, "judge", judged),
    ):
        digest, published, _ = train(config_of(home, "adaptive"), loses_one)
    assert digest == plain
    assert published.life.version > 0
    assert 0 in ages, "the rollout that has just ended is what they are judged on"
    lines = [line["rollout"] for line in read_metrics(home / "run")]
    assert lines[0]["drafter_tokens"] == 0, "there is nothing to train on yet"
    assert all(line["spot_seconds"] >= 0.1 for line in lines[2:])
    assert [line["spot_seconds"] for line in lines] == paid, "and the gate is told"
    assert len(lost) == loses


def test_of_a_drafter_that_is_not_trained_nobody_waits_for_more(home: Path, plain: str) -> None:
    with patch.object(TrainingGate, "catch_up", lambda gate, most: 1e9):
        digest, _, pool = train(config_of(home, "adaptive"), should_train=lambda gate: False)
        assert digest == plain
    assert not any(method == "spot" for _, method in pool.log)


@pytest.mark.parametrize(("drafter", "trains"), [("adaptive", True), ("suffix", False)])
def test_what_training_is_to_save_is_said_only_where_there_is_something_to_train(
    home: Path, drafter: str, trains: bool
) -> None:
    train(config_of(home, drafter))
    assert any("saves" in line["rollout"]["spot"] for line in read_metrics(home / "run")) == trains


@pytest.mark.parametrize(
    "method", ["fresh", "gained", "should_train", "rollout_ended", "catch_up", "taken_note", "state"]
)
def test_a_gate_that_fails_costs_speed_alone(home: Path, plain: str, method: str) -> None:
    def fails(self: TrainingGate, *arguments: Any) -> Any:
        raise ZeroDivisionError("at the gate")

    with patch.object(TrainingGate, method, fails):
        digest, _, pool = train(config_of(home, "adaptive"), should_train=fails if method == "should_train" else always)
    assert digest == plain
    assert pool.guard.inside is None


def test_a_cluster_that_fails_amid_it_is_no_failure_of_the_training(home: Path) -> None:
    def fails(self: TrainingGate, *arguments: Any) -> Any:
        raise ClusterError("all workers were lost")

    with patch.object(TrainingGate, "fresh", fails), pytest.raises(ClusterError):
        train(config_of(home, "adaptive"))


def test_those_who_decode_are_left_alone(home: Path) -> None:
    """Replicas are asked for of workers that trained since theirs was taken, judgements of those that are idle."""
    busy: list[bool] = []
    judge = ThreadWorker.judge

    def watched(self: ThreadWorker, *arguments: Any) -> Any:
        busy.append(self.engine.busy)
        return judge(self, *arguments)

    with patch.object(ThreadWorker, "judge", watched):
        _, _, pool = train(config_of(home, "adaptive"))
    assert busy
    assert not any(busy)
    for worker in range(2):
        calls = [method for index, method in pool.log if index == worker]
        begins = [calls[i + 1 :] for i, method in enumerate(calls) if method == "sync"]
        assert all(next(m for m in rest if m in ("decode", "judge", "sha256")) != "judge" for rest in begins)
    trained: set[int] = set()
    for worker, method in pool.log:
        assert method != "replica" or worker in trained
        trained = trained | {worker} if method == "spot" else trained - {worker} if method == "replica" else trained


def test_a_look_at_a_drafter_at_rest_is_broken_off_where_its_worker_is_wanted(home: Path) -> None:
    """Nothing is learned from it, nobody is asked for more, and a later rollout's look is done."""
    looks: list[tuple[bool, bool]] = []  # whether it was wanted, and broken off
    learned: list[float] = []
    judge = ThreadWorker.judge

    def looking(self: ThreadWorker, candidate: Any, number: float) -> Any:
        assert candidate is None
        judged = judge(self, candidate, number)
        assert judged is not None
        looks.append((self._wanted >= number, judged.broken_off))
        return judged

    config = config_of(home, "adaptive")
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 24})})
    gate = TrainingGate(config.speculation.training.unroll, trained=True)
    with (
        patch.object(ThreadWorker, "judge", looking),
        patch("tlt.cluster.publication.TrainingGate", lambda *arguments, **named: gate),
        patch.object(gate, "thresholds", replace(gate.thresholds, looks=1e6)),
        patch.object(gate, "fresh", learned.append),
    ):
        _, published, pool = train(config, should_train=lambda gate: False)
    assert published.life.tokens == published.life.version == 0
    assert set(looks) == {(True, True), (False, False)}
    assert 0 < len(learned) <= sum(not broken for _, broken in looks)
    assert not any(method in ("spot", "replica") for _, method in pool.log)


def test_one_that_hangs_in_a_judgement_is_replaced(home: Path) -> None:
    class Silent(TestPool):
        def wait(self, handles: Collection[Handle], timeout: float | None = None) -> list[Handle]:
            return [] if timeout is not None else super().wait(handles, timeout)

    crew = Crew(Silent(2, lambda index: None))
    crew.call(1, "judge", None)
    crew.call(0, "spot", 0.0)
    crew.call_back(("judge",), patience=-1.0)
    assert crew.losses == 1
    assert [(done.worker, done.method, done.lost) for done in crew.kept()] == [(1, "judge", True)], "who waits is told"
    assert crew.pending(1) == ["take_state"]
    assert crew.pending(0) == ["spot", "state"]


@pytest.mark.parametrize(
    ("method", "when"), [("spot", "before"), ("replica", "after"), ("judge", "before"), ("take_drafter", "after")]
)
def test_a_worker_lost_amid_training_or_publication(home: Path, plain: str, method: str, when: str) -> None:
    counts = 0

    def loses(worker: int, called: str) -> str:
        nonlocal counts
        counts += called == method
        return when if called == method and counts == 1 else ""

    digest, _, pool = train(config_of(home, "adaptive"), loses, better=1.0, stretch=1)  # much is published
    assert digest == plain
    assert counts > 1
    assert sum(m == "take_state" for _, m in pool.log) == 1


@pytest.mark.parametrize("method", ["train", "replica", "judge", "publish", "harvest"])
def test_a_trainer_that_fails_costs_speed_alone(home: Path, plain: str, method: str) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    with patch.object(SpotTrainer, method, fail):
        digest, published, _ = train(config_of(home, "adaptive"))
    assert digest == plain
    assert published.life.version == (method == "publish"), "that is the last one"


def test_a_drafter_that_turns_nan_is_never_published(home: Path, plain: str) -> None:
    real = SpotTrainer.train

    def spoil(self: SpotTrainer, *arguments: Any) -> Any:
        report = real(self, *arguments)
        for tensor in self.mean:
            tensor.fill_(float("nan"))
        return report

    with patch.object(SpotTrainer, "train", spoil):
        digest, published, pool = train(config_of(home, "adaptive"))
    assert digest == plain
    assert published.life.version == 0
    assert published.life.tokens > 0
    assert sum(method == "replica" for _, method in pool.log) > 1, "training goes on"
    assert all(worker.trainer.inside for worker in pool.workers)


def test_a_judgement_that_is_broken_off_is_gone_on_with(home: Path, plain: str) -> None:
    """Whoever is idle next, be it in another rollout; never by one who has something to decode."""
    judge, replica = ThreadWorker.judge, ThreadWorker.replica
    answers: list[Judgement | None] = []  # None: a replica, so the next candidate

    def impatient(self: ThreadWorker, candidate: Any, number: float) -> Any:
        if candidate and sum(answer is not None for answer in answers) % 3 < 2:
            self.interrupt(number)
        judged = judge(self, candidate, number)
        if candidate and judged:
            answers.append(judged)
        return judged

    def asked(self: ThreadWorker) -> Any:
        answers.append(None)
        return replica(self)

    with (
        patch.object(ThreadWorker, "judge", impatient),
        patch.object(ThreadWorker, "replica", asked),
    ):
        digest, published, _ = train(config_of(home, "adaptive"), better=1.0)
    assert digest == plain
    assert published.life.version > 0
    *of_candidates, _ = [
        [answer for answer in group if answer]
        for is_judged, group in itertools.groupby(answers, lambda answer: answer is not None)
        if is_judged
    ]
    assert any(len({answer.broken_off for answer in group}) == 2 for group in of_candidates)
    for group in of_candidates:
        assert not group[-1].broken_off or summed(group).entries >= published.life.wanted, "given up half-judged"


def test_one_that_the_run_goes_on_without_is_not_waited_for(home: Path) -> None:
    asked: list[tuple[int, str]] = []
    crew: Any = SimpleNamespace(size=3, present=[0, 2], call=lambda index, method: asked.append((index, method)))
    publication = Publication(crew, config_of(home, "adaptive"))
    life = publication.life
    publication.do(life._ask(Stage.COLLECTING, Collect([1, 2])))
    assert asked == [(2, "replica")]
    assert life.idle([0]) == []
    assert life.stage == Stage.COLLECTING, "the other one is still to answer"
    life.answered(2, None)
    life.idle([0])
    assert life.stage == Stage.TRAINING


def test_several_replicas_go_farther_from_where_they_began(home: Path) -> None:
    crew: Any = SimpleNamespace(size=2, present=[0, 1], pool=SimpleNamespace(put=lambda value: value))
    publication = Publication(crew, config_of(home, "adaptive"))
    start, trained = (Replica({"mean.fc.weight": torch.tensor([x])}, 10) for x in (1.0, 2.0))
    publication.do([Combine([trained, trained], Shared(start, None))])
    found = publication.life._trial.candidate.replica.weights["fc.weight"]
    assert found.item() == pytest.approx(1 + 2**0.5)


def test_what_is_idle_is_what_no_worker_decoded_in(home: Path) -> None:
    """Of three workers with ten seconds each, who decoded for five; and of eight steps two are done with this one."""
    crew: Any = SimpleNamespace(size=3, present=[0, 1, 2])
    publication, beside = Publication(crew, config_of(home, "adaptive")), Beside(0.1)
    beside.decoded([ROLLOUT] * 3, 5.0, 5.0)
    request = Request(Prompt(0, "", (1,) * 100), 0, 0, 0, SamplingParams())
    responses = [Response(request, [2] * length, [], [], "stop") for length in (300, 400)]
    stats = [RolloutStats(against_plain={"seconds": s, "plain_seconds": 9.0, "plain_rounds": 1.0}) for s in (2.0, 4.0)]
    slices: list[Any] = [SimpleNamespace(stats=one, costs=[]) for one in stats]
    publication.rollout_ends(1, 10.0, responses, beside, slices, Tracer())
    assert publication.life.gate.horizons[-1] == Horizon(6, 10.0, 25.0, 0.1, 3, entries=700, speed=3.0, version=1)


def test_rows_that_were_promised_to_one_that_trained_and_is_lost_are_given_to_others(home: Path) -> None:
    """Else the rollout waits for them for ever."""
    crew: Any = SimpleNamespace(size=2, present=[0, 1], break_off=lambda: None)
    coordinator = Coordinator(crew, config_of(home, "adaptive"))
    given, promised = (Row(Request(Prompt(0, "", (1, 2)), i, 0, i, SamplingParams())) for i in range(2))
    coordinator.queue = deque()
    coordinator.shares = [Share(), Share(rows={0: given}, promised=[promised])]
    coordinator._reclaim(1)
    assert list(coordinator.queue) == [[given, promised]]
    assert not coordinator.shares[1].promised


def test_the_horizon_is_of_who_is_left_and_costs_are_of_all_who_decoded(home: Path) -> None:
    """Of three workers one is gone: two have ten idle seconds each."""
    crew: Any = SimpleNamespace(size=3, present=[0, 2])
    publication = Publication(crew, config_of(home, "adaptive"))
    costs = [RoundCosts(weight, 1.0, {2: 1.5}) for weight in (1.0, 2.0)]
    slices: list[Any] = [SimpleNamespace(stats=RolloutStats(), costs=[one]) for one in costs]
    publication.rollout_ends(1, 10.0, [], Beside(0.1), slices, Tracer())
    horizon = publication.life.gate.horizons[-1]
    assert (horizon.workers, horizon.idle_seconds) == (2, pytest.approx(20.0))
    assert publication.life.gate.costs == costs
