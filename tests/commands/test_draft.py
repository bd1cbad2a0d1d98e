"""`tlt draft train` and `eval`: the budget in seconds, the weights that are kept, and what is advised."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from tiny import QUESTIONS, tiny_config

from tlt.commands import draft
from tlt.commands.draft import Curve, Workbench, evaluate, fit, harvest, train_drafter
from tlt.config import Config, ConfigError
from tlt.draft.eagle import EagleLayer, eagle_options, load_drafter
from tlt.draft.features import Harvest
from tlt.draft.strategy import PLAIN
from tlt.engine.engine import Engine
from tlt.spot.trainer import DrafterTrainer
from tlt.stopping import Stopped


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(draft, "time", clock)
    return clock


class Trainer:
    """Takes 2 s a step and 5 s an evaluation. Its one weight counts the steps."""

    def __init__(self, clock: Clock, held_back: list[float]) -> None:
        self.clock, self.held_back = clock, iter(held_back)
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
        self.rate_scale, self.steps, self.spent_on_evaluations = 1.0, 0.0, 0.0
        self.target = type("Target", (), {"device": torch.device("cpu")})
        self.config = type("Config", (), {"micro_batch_tokens": 64})

    def prepare(self, sample: Iterable[Harvest], from_scratch: bool) -> None:
        self.clock.now += 4.0

    @torch.no_grad()
    def epoch(self, items: Iterable[Harvest]) -> Iterator[list[float]]:
        for _ in range(3):
            self.clock.now += 2.0
            self.steps += 1
            self.layer.weight += 1
            yield [0.5]

    def acceptance(self, batches: Any) -> list[float]:
        """Called for the prompts held back."""
        assert [batch.version for batch in batches] == [0]
        self.clock.now += 5.0
        self.spent_on_evaluations += 5.0
        return [next(self.held_back), 0.25]


def item(version: int) -> Harvest:
    return Harvest(version, 0, 0, torch.zeros(9, dtype=torch.int64), torch.zeros(9, 4))


def fitted(clock: Clock, seconds: float, held_back: list[float]) -> tuple[Trainer, Curve]:
    trainer: Any = Trainer(clock, held_back)
    return trainer, fit(trainer, [item(1)], [item(0)], seconds)


@pytest.mark.parametrize("seconds", [60, 300, 1000])
def test_the_seconds_hold_evaluations_and_these_have_a_small_share(clock: Clock, seconds: float) -> None:
    trainer, curve = fitted(clock, seconds, [0.5] * 99)
    assert seconds - 2 <= clock.now <= seconds + 2, "up to a step"
    assert trainer.spent_on_evaluations <= 0.1 * seconds + 2 * 5, "the first and the last one whatever they take"
    assert len(curve.points) >= seconds / 60
    assert trainer.rate_scale == pytest.approx(0.1, abs=0.15)


def test_the_weights_that_are_best_on_prompts_held_back_are_kept(clock: Clock) -> None:
    """Training beyond them makes the drafter better on its training data alone."""
    rates = [0.3, 0.5, 0.6, 0.55, *[0.4] * 99]
    trainer, curve = fitted(clock, 400, rates)
    best = max(curve.points, key=lambda point: point["accept_length"])
    assert best is curve.points[2]
    assert curve.acceptance_rate == 0.6, "of its first draft token"
    assert best["accept_length"] == pytest.approx(1 + 0.6 + 0.6 * 0.25)
    steps = trainer.layer.weight.item()
    assert 0 < steps < trainer.steps
    spent_on_evaluations_before = 2 * 5
    assert best["seconds"] == pytest.approx(4 + 2 * steps + spent_on_evaluations_before)


@pytest.fixture(scope="module", autouse=True)
def two_are_held_out() -> Iterator[None]:
    with patch.object(draft, "_HELD_OUT", 2):
        yield


def config_of(home: Path, **rollout: Any) -> Config:
    return tiny_config(home, rollout={"group_size": 3, "max_new_tokens": 24} | rollout)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    home = tmp_path_factory.mktemp("home")
    return Workbench.of(config_of(home, stop_strings=["qz"]))


def test_prompts_are_held_out_and_all_are_answered_once_before_any_is_answered_twice(bench: Workbench) -> None:
    held_out, train = ({request.prompt.prompt_id for request in part} for part in (bench.held_out, bench.train))
    assert not held_out & train
    assert len(held_out | train) == len(QUESTIONS)
    assert len(bench.held_out) == 2
    assert [request.index for request in bench.train] == sorted([0, 1, 2] * (len(QUESTIONS) - 2))
    assert len({request.seed for request in bench.train}) == len(bench.train)


def test_a_harvest_ends_once_it_has_the_tokens(bench: Workbench) -> None:
    layer = EagleLayer(eagle_options(bench.target.options, "eagle1", 32))
    found = harvest(bench, layer, 100)
    assert 100 <= found.tokens <= 100 + 32
    assert len(found.items) < len(bench.train), "others were not decoded to their ends"
    assert harvest(bench, layer, 10_000).tokens < 10_000, "all prompts are answered"
    training = bench.config.speculation.training.model_copy(update={"buffer_tokens": 50})
    speculation = bench.config.speculation.model_copy(update={"training": training})
    less = replace(bench, config=bench.config.model_copy(update={"speculation": speculation}))
    assert harvest(less, layer, 100).tokens >= 100, "the limit of a run does not apply"


def test_tokens_that_exceed_the_free_memory_are_refused(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = EagleLayer(eagle_options(bench.target.options, "eagle1", 32))
    monkeypatch.setattr(draft, "free_bytes", lambda device: 100 * 32 * 8)  # hidden states have 32 numbers in float64
    harvest(bench, layer, 100)
    with pytest.raises(ConfigError, match=r"^the hidden states of up to 101 tokens need .*: lower --tokens$"):
        harvest(bench, layer, 101)


def test_a_judgement_ends_with_its_seconds(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = EagleLayer(eagle_options(bench.target.options, "eagle1", 32))
    whole = evaluate(bench, layer, PLAIN)
    assert whole["accept_length"] == 1.0
    assert whole["interval"] == 0.0, "plain decoding commits a token a pass"

    class Slow(Clock):
        def perf_counter(self) -> float:
            self.now += 10.0
            return self.now

    monkeypatch.setattr(draft, "time", Slow())
    monkeypatch.setattr(draft, "_LEAST_ROUNDS", 3)
    cut = evaluate(bench, layer, PLAIN, seconds=50.0)
    assert cut["tokens"] < whole["tokens"]
    assert cut["tokens_per_second"] < 1.0
    assert math.isfinite(cut["interval"])


def test_validation_prompts_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(draft, "fit", given)
    for tokens in (100, 9000):
        with pytest.raises(KeyboardInterrupt):
            train_drafter(tiny_config(tmp_path), tmp_path / "drafter", tokens, seconds=1.0)
    (said,) = capsys.readouterr().out.splitlines()
    assert "of 9,000 tokens collected, because all prompts are answered: for more, give more prompts or raise" in said
    taught, held_back = ({item.prompt_id for item in part} for part in given.call_args.args[1:3])
    assert (bool(taught), bool(held_back), taught & held_back) == (True, True, set())


def test_a_signal_ends_the_training_and_keeps_the_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    epoch, signals = DrafterTrainer.epoch, iter([signal.SIGTERM])

    def interrupted(self: DrafterTrainer, items: Any) -> Iterator[Any]:
        for step in epoch(self, items):
            for number in signals:
                os.kill(os.getpid(), number)
            yield step

    monkeypatch.setattr(DrafterTrainer, "epoch", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM ended the training early") as stopped:
        train_drafter(config, tmp_path / "drafter", 400, seconds=90.0)
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    facts = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert facts["held_out"] == []
    assert facts["train_seconds"] < 80
    target = Workbench.of(config).target.options
    best = max(facts["curve"], key=lambda point: point["accept_length"])
    assert load_drafter(tmp_path / "drafter", target).acceptance_rate == best["held_back"][0]


def test_a_signal_during_the_collection_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_round, rounds = Engine.round, list[int]()

    def interrupted(self: Engine) -> Any:
        rounds.append(1)
        if len(rounds) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return one_round(self)

    monkeypatch.setattr(Engine, "round", interrupted)
    with pytest.raises(Stopped, match=r"SIGINT ended the collection of training data: .* nothing was kept") as stopped:
        train_drafter(config_of(tmp_path), tmp_path / "drafter", 400, seconds=90.0)
    assert stopped.value.exit_code == 130
    assert len(rounds) == 3
    assert not (tmp_path / "drafter").exists()


def test_an_interrupted_evaluation_leaves_a_whole_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    monkeypatch.setattr(draft, "judge", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as stopped:
        train_drafter(config, tmp_path / "drafter", 400, seconds=1.0)
    assert f"the drafter is in {tmp_path / 'drafter'}, without a final evaluation" in stopped.value.__notes__[0]
    assert json.loads((tmp_path / "drafter" / "training.json").read_text())["held_out"] == []
    load_drafter(tmp_path / "drafter", Workbench.of(config).target.options)
