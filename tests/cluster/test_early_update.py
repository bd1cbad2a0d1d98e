"""Gradients that idle workers compute before the rollout ends. The policy is always the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from pools import Choose
from test_coordinator import STEPS, train
from test_coordinator import config_of as four_workers

from tlt.cluster.early_update import METHOD, EarlyUpdate
from tlt.cluster.run_worker import EarlySlice
from tlt.cluster.supervisor import Done
from tlt.config import Config, TrainConfig
from tlt.metrics import read_metrics


def config_of(home: Path, **sections: dict[str, Any]) -> Config:
    settings = {"updates_per_step": 1, "micro_batch_tokens": 32} | sections.pop("train", {})
    rollout = {"prompts_per_step": 6, "max_new_tokens": 40} | sections.pop("rollout", {})
    none = {"drafter": "off", "look_ahead": 0}
    return four_workers(home, 4, train=settings, rollout=rollout, speculation=none, **sections)


def early_shares(config: Config) -> list[float]:
    return [line["update"]["early"] for line in read_metrics(Path(config.run.folder))]


def in_turn() -> Choose:
    turn = count()
    return lambda ready: next(turn)


def off(home: Path, **sections: dict[str, Any]) -> tuple[str, Any]:
    config = config_of(home, **sections)
    with patch("tlt.loop.has_early_shards", return_value=False):
        digest, learned, pool = train(config)
    assert early_shares(config) == [0.0] * STEPS
    assert METHOD not in {method for _, method in pool.log}
    return digest, learned


@pytest.fixture(scope="module")
def expected(home: Path) -> tuple[str, Any]:
    return off(home)


def test_the_policy_is_that_of_an_update_after_the_rollout(home: Path, expected: Any) -> None:
    config = config_of(home)
    digest, learned, _ = train(config, in_turn())
    assert (digest, learned) == expected
    assert min(early_shares(config)) > 0.1
    lines = read_metrics(Path(config.run.folder))
    assert all(line["rollout"]["early_seconds"] > 0 for line in lines)
    assert any(worker["EARLY"] > 0 for line in lines for worker in line["workers"])


@pytest.mark.parametrize("live", [2, 4])
def test_any_number_of_workers_in_any_order(home: Path, expected: Any, live: int) -> None:
    config, random = config_of(home, cluster={"grace": 0.05, "min_workers": 1}), Random(live)
    assert train(config, lambda ready: random.randrange(ready), room=lambda: live)[:2] == expected


@pytest.mark.parametrize(("which", "when"), [(0, "before"), (3, "after")])
def test_a_worker_lost_with_early_gradients(home: Path, expected: Any, when: str, which: int) -> None:
    """It is lost as it begins a shard, or when it has computed more of it than the coordinator knows."""
    calls = count()

    def loses(worker: int, method: str) -> str:
        return when if method == METHOD and next(calls) == which else ""

    *found, pool = train(config_of(home), in_turn(), loses)
    assert tuple(found) == expected
    assert "take_state" in {method for _, method in pool.log}


def test_a_broken_update_is_repeated_without_early_gradients(home: Path, expected: Any) -> None:
    calls = count()

    def loses(worker: int, method: str) -> str:
        return "amid" if method == "update" and next(calls) == 1 else ""

    config = config_of(home)
    assert train(config, in_turn(), loses)[:2] == expected
    assert early_shares(config)[0] == 0.0


WAVES = {"rollout": {"max_waves": 2, "prompts_per_step": 4}, "reward": {"name": "tiny_rewards:every_third"}}

FEW_PROMPTS = {"rollout": {"prompts_per_step": 3, "group_size": 4}}


@pytest.mark.parametrize(
    ("sections", "choose"),
    [
        ({"train": {"lora": {"rank": 2}, "loss": "dapo", "advantage": "rloo"}}, in_turn()),
        (WAVES | {"train": {"updates_per_step": 2, "kl_weight": 0.1}}, lambda ready: 0),
        ({"train": {"kl_weight": 0.1, "kl_in": "reward", "epochs": 2, "advantage": "reinforce_pp"}}, in_turn()),
        (FEW_PROMPTS, in_turn()),
        (FEW_PROMPTS | {"train": {"updates_per_step": 2, "kl_weight": 0.1}}, in_turn()),
    ],
    ids=[
        *("adapters", "several steps, dynamic sampling and a KL term", "a KL term in the reward"),
        *("more workers than prompts", "more workers than prompts, several steps and a KL term"),
    ],
)
def test_other_recipes(home: Path, sections: dict[str, Any], choose: Choose) -> None:
    config = config_of(home, **sections)
    found = train(config, choose)[:2]
    assert max(early_shares(config)) > 0.0
    assert found == off(home, **sections)


def of_step(shards: Sequence[str], **train: Any) -> tuple[EarlyUpdate, list[Any]]:
    """Return the early update of a step with these shards, and a list of its calls."""
    log = list[Any]()
    early = EarlyUpdate(SimpleNamespace(call_idle=lambda *call: log.append(call)), TrainConfig(**train))  # type: ignore
    begin(early, shards)
    return early, log


def begin(early: EarlyUpdate, shards: Sequence[str]) -> None:
    early.begin(SimpleNamespace(shards=lambda so_far: list(shards)))  # type: ignore[arg-type]


def test_each_shard_has_one_worker_until_it_is_lost() -> None:
    early, log = of_step("ab")
    assert [early.next_call(worker, dict, 0.5) for worker in (1, 0, 2)] == [True, True, False]
    early.handle_result(Done(1, METHOD, EarlySlice(0, 0.5, 1.0)))
    assert early.next_call(1, dict, 0.5), "it goes on"
    early.handle_result(Done(1, METHOD, EarlySlice(0, 1.0, 2.0)))
    early.handle_result(Done(0, METHOD, EarlySlice(1, 0.25, 4.0)))
    assert not early.next_call(1, dict, 0.5), "the other one is another worker's"
    assert early.held_by([0, 1, 2]) == [{1: 0.25}, {0: 1.0}, {}]
    early.handle_result(Done(0, "decode", None, lost=True))
    assert early.next_call(2, dict, 0.5)
    expected = [(1, 0, "a"), (0, 1, "b"), (1, 0, "a"), (2, 1, "b")]
    assert log == [(worker, METHOD, number, shard, 0.5) for worker, number, shard in expected]
    assert [early.take_seconds(), early.take_seconds()] == [7.0, 0.0]
    early.begin(None)
    assert early.held_by([0, 1, 2]) == [{}, {}, {}], "a step begins without shards of the one before"


def test_a_call_of_an_earlier_wave_says_nothing_about_this_one() -> None:
    early, _ = of_step("ab")
    assert early.next_call(0, dict, 0.5)
    begin(early, "cd")
    early.handle_result(Done(0, METHOD, EarlySlice(0, 1.0, 1.0)))
    assert early.held_by([0]) == [{}]
    assert early.take_seconds() == 1.0


@pytest.mark.parametrize(("epochs", "most"), [(1, 4), (2, 6)])
def test_a_worker_keeps_a_few_gradients_or_any_number_of_logprobs(epochs: int, most: int) -> None:
    early, _ = of_step("abcdef", epochs=epochs)
    for shard in range(most):
        assert early.next_call(0, dict, 0.5)
        early.handle_result(Done(0, METHOD, EarlySlice(shard, 1.0, 1.0)))
    assert not early.next_call(0, dict, 0.5)
    assert early.next_call(1, dict, 0.5) == (most < 6)


def test_a_worker_without_enough_memory_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    early, _ = of_step("a")
    assert early.next_call(0, dict, 0.5)
    early.handle_result(Done(0, METHOD, None))
    assert "worker 0 has too little memory for the early update" in caplog.text
    assert not early.next_call(0, dict, 0.5)
    assert early.next_call(1, dict, 0.5)
