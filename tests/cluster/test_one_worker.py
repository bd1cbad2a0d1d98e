"""One worker in this process. It frees its cache before an update, and trains its drafter between rollouts. No token
depends on it, and its errors only cost speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config

from tlt.cluster.drafter_training import DrafterTraining
from tlt.cluster.pool import local_worker
from tlt.cluster.remote import ClusterRollout
from tlt.cluster.worker import Worker
from tlt.config import Config
from tlt.data.tokenizer import load_tokenizer
from tlt.draft.strategy import Strategy
from tlt.engine.tuner import Fixed
from tlt.integrations.decoding import train_until
from tlt.run.opening import make_parts
from tlt.spot import schedule
from tlt.spot.schedule import RULE
from tlt.spot.spot import SpotTrainer
from tlt.types import Request, RolloutStats


@pytest.fixture(autouse=True)
def small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate each candidate soon."""
    monkeypatch.setattr(schedule, "RULE", replace(RULE, stretch=1, burst=10**9))


def make(config: Config) -> ClusterRollout:
    torch.manual_seed(0)
    parts, policy = make_parts(config, load_tokenizer(config.model.path))
    rollout: Any = parts.rollout
    rollout.prompts, rollout.sampling, rollout.policy = parts.prompts, parts.sampling, policy  # pyright: ignore
    return rollout


def decode(rollout: Any, step: int) -> tuple[list[list[int]], RolloutStats]:
    params, group = replace(rollout.sampling, max_new_tokens=24), range(2)
    prompts = enumerate(rollout.prompts)
    requests = [Request(prompt, i, step, 100 * step + 10 * p + i, params) for p, prompt in prompts for i in group]
    responses, stats = rollout.generate(requests, lambda response: None)
    return [r.token_ids for r in sorted(responses, key=lambda r: r.request.seed)], stats


def config_of(folder: Path, extra: float = 1.0) -> Config:
    training = {"extra": extra, "micro_batch_tokens": 64, "unroll": 2}
    return tiny_config(folder, speculation={"drafter": "adaptive", "window": 32, "training": training})


def training_of(rollout: ClusterRollout) -> DrafterTraining:
    return rollout.coordinator.idle.training


def worker_of(rollout: ClusterRollout) -> Worker:
    return local_worker(rollout.supervisor.pool)


def run(rollout: Any, steps: int) -> None:
    for step in range(steps):
        decode(rollout, step)
        rollout.release()
        rollout.sync(rollout.policy, step + 1)


def assert_equal_tokens(one: Any, other: Any, step: int) -> RolloutStats:
    """Decode and sync both. Return the counters of the first one."""
    tokens, stats = decode(one, step)
    assert tokens == decode(other, step)[0]
    for rollout in (one, other):
        rollout.release()
        rollout.sync(rollout.policy, step + 1)
    return stats


def test_a_cold_start_changes_no_token_and_trains(tmp_path: Path) -> None:
    plain, trained = make(tiny_config(tmp_path)), make(config_of(tmp_path))
    training = training_of(trained)
    assert training.is_on
    assert "eagle" in worker_of(trained).engine.drafters.usable  # pyright: ignore
    for step in range(4):
        stats = assert_equal_tokens(trained, plain, step)
        assert stats.seconds["spot"] > 0
        assert (stats.drafter_tokens > 0) == (step > 0)
    assert training.version > 0, "it learned something"
    worker: Any = worker_of(trained)
    assert worker.engine.drafters.usable["eagle"].acceptance_rate == worker.spot.trainer.in_use.acceptance_rate


def test_the_schedule_gets_the_acceptance_rate_of_the_learned_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, seen = make(config_of(tmp_path)), []
    worker_of(rollout).engine.tuner = Fixed(Strategy("eagle", 2))  # pyright: ignore
    monkeypatch.setattr(training_of(rollout), "rollout_ended", lambda seconds, rate: seen.append(rate))
    _, stats = decode(rollout, 0)
    assert seen == [stats.acceptance_rate["eagle"]]


def test_a_candidate_is_published_although_the_time_is_over(tmp_path: Path) -> None:
    rollout = make(config_of(tmp_path))
    run(rollout, 2)
    training = training_of(rollout)
    version = training.version
    rollout.coordinator.idle.train_for(lambda: float(training._to_publish is None))
    rollout.release()
    assert training.version == version + 1


def test_a_failing_trainer_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rollout, plain, calls = make(config_of(tmp_path)), make(tiny_config(tmp_path)), list[None]()

    def broken(self: SpotTrainer, seconds: float, stop: Any) -> Any:
        calls.append(None)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(SpotTrainer, "train", broken)
    for step in range(4):
        assert_equal_tokens(rollout, plain, step)
    assert len(calls) == 1
    assert "out of memory" in caplog.text
    assert "the run continues without it" in caplog.text
    assert worker_of(rollout).spot.trainer is None


def test_without_an_extra_share_there_is_no_trainer(tmp_path: Path) -> None:
    for config in (config_of(tmp_path, extra=0.0), tiny_config(tmp_path)):
        rollout = make(config)
        assert not training_of(rollout).is_on
        assert worker_of(rollout).spot.trainer is None


def test_the_end_waits_for_the_drafter_to_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, waited = make(config_of(tmp_path)), list[None]()
    monkeypatch.setattr(training_of(rollout).saver, "wait", lambda: waited.append(None))
    rollout.close()
    assert waited == [None]


def test_training_takes_its_share_of_time_and_no_more(tmp_path: Path) -> None:
    rollout = make(config_of(tmp_path))
    run(rollout, 2)
    training, asked = training_of(rollout), []

    def is_over() -> bool:
        asked.append(True)
        return len(asked) > 1

    training.take_tokens()
    train_until(is_over, rollout)
    rollout.release()
    assert training.take_tokens() == 0, "interrupted in its first micro-batch"
    assert training.under_way is None
    assert not worker_of(rollout).is_wanted()


def test_a_resumed_run_continues_with_its_drafter(tmp_path: Path) -> None:
    first, second = (make(config_of(tmp_path)) for _ in range(2))
    run(first, 3)
    pair: Any = training_of(first), training_of(second)
    pair[0].close()
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.state()["tuner"]["times"] == first.state()["tuner"]["times"] != {}
    assert pair[0].version == pair[1].version > 0
    assert pair[0].schedule.state() == pair[1].schedule.state()
    for one, other in zip(*(worker_of(it).spot.trainer.in_use.parameters() for it in (first, second)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert decode(second, 9)[0] == decode(make(tiny_config(tmp_path)), 9)[0]


def test_memory_is_freed_and_allocated_again_without_a_change_of_tokens(tmp_path: Path) -> None:
    rollout = make(tiny_config(tmp_path))
    worker: Any = worker_of(rollout)
    store, first = worker.engine.cache.store, decode(rollout, 0)[0]
    rollout.release()
    assert sum(tensor.numel() for tensor in store.layers) == 0
    assert decode(rollout, 0)[0] == first
