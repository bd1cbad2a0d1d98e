"""One worker that trains its drafter between rollouts: no token depends on it, and nothing that fails in it is felt."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config

from tlt.cluster.local import LocalRollout
from tlt.config import Config
from tlt.draft import gate
from tlt.draft.gate import SpotReport, TrainingGate
from tlt.draft.spot import SpotTrainer
from tlt.parts import make_parts
from tlt.tokenizer import load_tokenizer
from tlt.types import Request, RolloutStats

TRAINED = {"budget": 0.5, "micro_batch_tokens": 64, "unroll": 2}


@pytest.fixture(autouse=True)
def small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start-up profile takes seconds: every round costs the same here."""

    def even(target: Any, config: Any, drafters: Any, arms: Any, layout: Any) -> dict[int, Any]:
        return {rows: {arm: 1.0 + 0.01 * arm.depth for arm in arms} for rows in (1, 4)}

    monkeypatch.setattr("tlt.build.profile", even)


def make(config: Config) -> LocalRollout:
    torch.manual_seed(0)
    parts, policy = make_parts(config, load_tokenizer(config.model.path))
    assert isinstance(parts.rollout, LocalRollout)
    parts.rollout.prompts, parts.rollout.sampling = parts.prompts, parts.sampling  # pyright: ignore
    parts.rollout.policy = policy  # pyright: ignore
    return parts.rollout


def decode(rollout: Any, step: int) -> tuple[list[list[int]], RolloutStats]:
    params = replace(rollout.sampling, max_new_tokens=24)
    requests = [
        Request(prompt, i, step, 100 * step + 10 * p + i, params)
        for p, prompt in enumerate(rollout.prompts)
        for i in range(2)
    ]
    responses, stats = rollout.generate(requests, lambda response: None)
    return [r.token_ids for r in sorted(responses, key=lambda r: r.request.seed)], stats


def config_of(folder: Path, **training: Any) -> Config:
    speculation = {"drafter": "adaptive", "window": 32, "training": TRAINED | training}
    return tiny_config(folder, speculation=speculation)


def test_a_cold_start_changes_no_token_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a random drafter, as soon as there was a step before; the engine drafts with what is published."""
    monkeypatch.setattr(TrainingGate, "should_train", lambda self: True)
    plain = make(tiny_config(tmp_path))
    trained = make(config_of(tmp_path, budget=1.0))
    assert plain.budget.inside is None
    assert trained.budget.inside
    assert "eagle" in trained.engine.drafters.usable
    published = []
    for step in range(4):
        tokens, stats = decode(trained, step)
        assert tokens == decode(plain, step)[0]
        assert stats.seconds["spot"] > 0
        assert (stats.drafter_tokens > 0) == (step > 0)
        for rollout in (plain, trained):
            rollout.sync(rollout.policy, step + 1)  # pyright: ignore
        published.append(trained.budget.inside.life.version)
    assert published[-1] > 0, "it learned something"
    drafter = trained.engine.drafters.usable["eagle"]
    assert drafter.agreement == trained.budget.inside.trainer.in_use.agreement


def test_without_a_budget_there_is_no_trainer(tmp_path: Path) -> None:
    assert make(config_of(tmp_path, budget=0.0)).budget.inside is None


def test_a_trainer_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, plain = make(config_of(tmp_path)), make(tiny_config(tmp_path))

    def broken(self: SpotTrainer, seconds: float, stop: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(SpotTrainer, "train", broken)
    monkeypatch.setattr(TrainingGate, "should_train", lambda self: True)
    for step in range(2):
        assert decode(rollout, step)[0] == decode(plain, step)[0]
    assert rollout.budget.inside is None


def test_one_that_rests_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = make(config_of(tmp_path))
    assert rollout.budget.inside
    monkeypatch.setattr(TrainingGate, "should_train", lambda self: False)
    _, stats = decode(rollout, 0)
    assert stats.drafter_tokens == 0
    assert stats.spot["accept_length"] >= 1, "but watched"
    assert rollout.budget.inside.life.gate.horizons[-1].steps == config_of(tmp_path).train.steps - 1


def test_looks_at_one_that_rests_take_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "THRESHOLDS", replace(gate.THRESHOLDS, looks=1e-9, surprise=-math.inf))
    monkeypatch.setattr(TrainingGate, "should_train", lambda self: False)
    rollout, looks = make(config_of(tmp_path)), []
    for step in range(3):
        looks.append("accept_length" in decode(rollout, step)[1].spot)
        rollout.sync(rollout.policy, step + 1)  # pyright: ignore
    assert looks == [True, False, False], "the first one took what many rollouts may"


@pytest.mark.parametrize("damaged", [False, True])
def test_what_follows_a_run_whose_training_failed_goes_on_from_its_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    monkeypatch.setattr(gate, "THRESHOLDS", replace(gate.THRESHOLDS, stretch=1))
    monkeypatch.setattr(TrainingGate, "should_train", lambda self: True)
    first, second = (make(config_of(tmp_path, budget=1.0)) for _ in range(2))
    for step in range(3):
        decode(first, step)
        first.sync(first.policy, step + 1)  # pyright: ignore
    assert first.budget.inside
    assert second.budget.inside
    first.budget.inside.saver.wait()
    version, first.budget.inside = first.budget.inside.life.version, None
    for file in (tmp_path / "run" / "drafter").glob("*/model.safetensors") if damaged else ():
        file.write_bytes(b"")
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.budget.inside.life.version == version > 0
    assert (second.budget.inside.life.in_use is None) == damaged


def test_a_resumed_run_goes_on_with_the_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "THRESHOLDS", replace(gate.THRESHOLDS, stretch=1))
    monkeypatch.setattr(TrainingGate, "should_train", lambda self: True)
    config = config_of(tmp_path, budget=1.0)
    first = make(config)
    for step in range(3):
        decode(first, step)
        first.sync(first.policy, step + 1)  # pyright: ignore
    assert first.budget.inside
    first.budget.inside.saver.wait()
    state = json.loads(json.dumps(first.state()))
    second = make(config)
    second.load_state(state)
    assert second.budget.inside
    lives = [side.budget.inside.life for side in (first, second)]
    assert lives[0].version == lives[1].version > 0
    assert lives[0].gate.state() == lives[1].gate.state()
    trainers = [side.budget.inside.trainer for side in (first, second)]
    for one, other in zip(*(trainer.in_use.parameters() for trainer in trainers), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    replica = trainers[1].replica()
    assert replica
    assert replica.tensors["steps"] > 0
    for name, parameter in trainers[1].in_use.named_parameters():
        assert torch.equal(replica.weights[name], parameter), "training goes on from there"
    assert decode(second, 9)[0] == decode(make(tiny_config(tmp_path)), 9)[0]


def test_what_has_no_learned_drafter_has_no_trainer(tmp_path: Path) -> None:
    assert make(tiny_config(tmp_path, speculation={"training": TRAINED})).budget.inside is None, (
        "speculation.drafter = 'suffix'"
    )


def test_idle_time_is_told_of_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slices in it; the next one, over at once, is of the same harvest."""
    monkeypatch.setattr(TrainingGate, "should_train", lambda self: True)
    rollout = make(config_of(tmp_path))
    decode(rollout, 0)
    budget, engine = rollout.budget.inside, rollout.engine
    assert budget
    begun, slices = list[int](), iter([SpotReport(1, 10, 0.1), SpotReport(1, 10, 0.1), SpotReport()])
    monkeypatch.setattr(budget.life, "rollout_begins", begun.append)
    monkeypatch.setattr(budget, "_train", lambda seconds, is_over: next(slices))
    engine.stats.drafter_tokens, budget.idle = 0, 1000.0
    budget.spend_idle(engine, lambda: False)
    assert engine.stats.drafter_tokens == 20
    assert budget.idle == 1000.0, "it returned early"
    budget.spend_idle(engine, lambda: True)
    assert budget.idle < 1000.0
    assert begun == [budget.trainer.target.version] * 2
