"""Gradients that idle workers compute before the rollout ends. The policy is always the same."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from pools import Choose
from test_coordinator import AT_ONCE, train
from tiny import tiny_config

from tlt.cluster.crew import Done
from tlt.cluster.early import METHOD, EarlyUpdate
from tlt.cluster.worker import EarlySlice
from tlt.config import Config, TrainConfig
from tlt.metrics import read_metrics

STEPS = 2


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def config_of(home: Path, **sections: dict[str, Any]) -> Config:
    cluster = {"workers": 4, "slice_seconds": AT_ONCE}
    settings = {"steps": STEPS, "learning_rate": 1e-3, "micro_batch_tokens": 32} | sections.pop("train", {})
    stops = list("abcdefghij ")  # lengths of all kinds
    rollout = {"stop_strings": stops, "prompts_per_step": 6, "max_new_tokens": 40} | sections.pop("rollout", {})
    reward = {"name": "tiny_rewards:share_of_low_bytes", "folder": str(Path(__file__).parent.parent)}
    reward |= sections.pop("reward", {})
    run = {"folder": str(home / "run"), "overwrite": True, "seed": 1}
    none = {"drafter": "off", "look_ahead": 0}
    return tiny_config(
        home, reward=reward, rollout=rollout, cluster=cluster, train=settings, run=run, speculation=none, **sections
    )


def early_shares(config: Config) -> list[float]:
    return [line["update"]["early"] for line in read_metrics(Path(config.run.folder))]


def off(home: Path, **sections: dict[str, Any]) -> tuple[str, Any]:
    config = config_of(home, train=sections.pop("train", {}) | {"early_update": False}, **sections)
    digest, learned, pool = train(config)
    assert early_shares(config) == [0.0] * STEPS
    assert METHOD not in {method for _, method in pool.log}
    return digest, learned


@pytest.fixture(scope="module")
def expected(home: Path) -> tuple[str, Any]:
    return off(home)


def in_turn() -> Any:
    turn = count()
    return lambda ready: next(turn)


def test_the_policy_is_that_of_an_update_after_the_rollout(home: Path, expected: Any) -> None:
    config = config_of(home)
    digest, learned, _ = train(config, in_turn())
    assert (digest, learned) == expected
    assert min(early_shares(config)) > 0.1
    lines = read_metrics(Path(config.run.folder))
    assert all(line["rollout"]["early_seconds"] > 0 for line in lines)
    assert any(worker["EARLY"] > 0 for line in lines for worker in line["workers"])


@pytest.mark.parametrize("live", [1, 2, 4])
def test_any_number_of_workers_in_any_order(home: Path, expected: Any, live: int) -> None:
    config, random = config_of(home), Random(live)
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"grace": 0.05, "min_workers": 1})})
    assert train(config, lambda ready: random.randrange(ready), room=lambda: live)[:2] == expected


@pytest.mark.parametrize("which", [0, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_lost_with_early_gradients(home: Path, expected: Any, when: str, which: int) -> None:
    """It is lost as it begins a shard, or when it has computed more of it than the coordinator knows."""
    calls = count()
    digest, learned, pool = train(
        config_of(home), in_turn(), lambda worker, method: when if method == METHOD and next(calls) == which else ""
    )
    assert (digest, learned) == expected
    assert "take_state" in {method for _, method in pool.log}


def test_a_broken_update_is_repeated_without_early_gradients(home: Path, expected: Any) -> None:
    calls = count()

    def loses(worker: int, method: str) -> str:
        return "amid" if method == "update" and next(calls) == 1 else ""

    config = config_of(home)
    assert train(config, in_turn(), loses)[:2] == expected
    assert early_shares(config)[0] == 0.0


@pytest.mark.parametrize(
    ("sections", "choose"),
    [
        (
            {
                "rollout": {"max_waves": 2, "prompts_per_step": 4},
                "reward": {"name": "tiny_rewards:every_third"},
                "train": {"kl_weight": 0.1},
            },
            lambda ready: 0,
        ),
        ({"train": {"lora": {"rank": 2}, "loss": "dapo", "advantage": "rloo"}}, in_turn()),
        (
            {
                "rollout": {"max_waves": 2, "prompts_per_step": 4},
                "reward": {"name": "tiny_rewards:every_third"},
                "train": {"updates_per_step": 2, "kl_weight": 0.1},
            },
            lambda ready: 0,
        ),
        ({"train": {"kl_weight": 0.1, "kl_in": "reward", "epochs": 2, "advantage": "reinforce_pp"}}, in_turn()),
    ],
    ids=["dynamic sampling and a KL term", "adapters", "several steps and dynamic sampling", "a KL term in the reward"],
)
def test_other_recipes(home: Path, sections: dict[str, Any], choose: Choose) -> None:
    config = config_of(home, **sections)
    found = train(config, choose)[:2]
    assert max(early_shares(config)) > 0.0
    assert found == off(home, **sections)


class Calls:
    """Crew that records its calls."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def call_idle(self, *arguments: Any) -> None:
        self.log.append(arguments)


def test_each_shard_has_one_worker_until_it_is_lost() -> None:
    crew = Calls()
    early = EarlyUpdate(crew, TrainConfig())  # type: ignore[arg-type]
    early.begin(SimpleNamespace(shards=lambda so_far: ["a", "b"]))  # type: ignore[arg-type]
    assert [early.next_call(worker, {}, 0.5) for worker in (1, 0, 2)] == [True, True, False]
    early.handle_result(Done(1, METHOD, EarlySlice(0, 0.5, 1.0)))
    assert early.next_call(1, {}, 0.5), "it goes on"
    early.handle_result(Done(1, METHOD, EarlySlice(0, 1.0, 2.0)))
    early.handle_result(Done(0, METHOD, EarlySlice(1, 0.25, 4.0)))
    assert not early.next_call(1, {}, 0.5), "the other one is another worker's"
    assert early.held_by([0, 1, 2]) == [{1: 0.25}, {0: 1.0}, {}]
    early.handle_result(Done(0, "decode", None, lost=True))
    assert early.next_call(2, {}, 0.5)
    assert crew.log == [
        (w, METHOD, k, name, 0.5) for w, k, name in [(1, 0, "a"), (0, 1, "b"), (1, 0, "a"), (2, 1, "b")]
    ]
    assert [early.take_seconds(), early.take_seconds()] == [7.0, 0.0]
    early.begin(None)
    assert early.held_by([0, 1, 2]) == [{}, {}, {}], "a step begins without shards of the one before"


def test_a_call_of_an_earlier_wave_says_nothing_about_this_one() -> None:
    early = EarlyUpdate(Calls(), TrainConfig())  # type: ignore[arg-type]
    early.begin(SimpleNamespace(shards=lambda so_far: ["a", "b"]))  # type: ignore[arg-type]
    assert early.next_call(0, {}, 0.5)
    early.begin(SimpleNamespace(shards=lambda so_far: ["c", "d"]))  # type: ignore[arg-type]
    early.handle_result(Done(0, METHOD, EarlySlice(0, 1.0, 1.0)))
    assert early.held_by([0]) == [{}]
    assert early.take_seconds() == 1.0


def test_a_worker_keeps_a_few_gradients() -> None:
    early = EarlyUpdate(Calls(), TrainConfig())  # type: ignore[arg-type]
    early.begin(SimpleNamespace(shards=lambda so_far: list("abcdef")))  # type: ignore[arg-type]
    for shard in range(4):
        assert early.next_call(0, {}, 0.5)
        early.handle_result(Done(0, METHOD, EarlySlice(shard, 1.0, 1.0)))
    assert not early.next_call(0, {}, 0.5)
    assert early.next_call(1, {}, 0.5)


def test_a_worker_keeps_any_number_of_logprobs() -> None:
    early = EarlyUpdate(Calls(), TrainConfig(epochs=2))  # type: ignore[arg-type]
    early.begin(SimpleNamespace(shards=lambda so_far: list("abcdef")))  # type: ignore[arg-type]
    for shard in range(6):
        assert early.next_call(0, {}, 0.5)
        early.handle_result(Done(0, METHOD, EarlySlice(shard, 1.0, 1.0)))


def test_a_worker_without_enough_memory_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    early = EarlyUpdate(Calls(), TrainConfig())  # type: ignore[arg-type]
    early.begin(SimpleNamespace(shards=lambda so_far: ["a"]))  # type: ignore[arg-type]
    assert early.next_call(0, {}, 0.5)
    early.handle_result(Done(0, METHOD, None))
    assert "worker 0 has too little memory for the early update" in caplog.text
    assert not early.next_call(0, {}, 0.5)
    assert early.next_call(1, {}, 0.5)
