"""Gradients that idle workers compute before the rollout ends: always the same policy."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from test_coordinator import AT_ONCE, train
from tiny import tiny_config

from tlt.config import Config
from tlt.metrics import read_metrics

STEPS = 2


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def config_of(home: Path, workers: int = 4, **sections: dict[str, Any]) -> Config:
    reward = {"name": "tiny_rewards:share_of_low_bytes", "folder": str(Path(__file__).parent.parent)}
    cluster = {"workers": workers, "slice_seconds": AT_ONCE} | sections.pop("cluster", {})
    settings = {"steps": STEPS, "learning_rate": 1e-3, "micro_batch_tokens": 32} | sections.pop("train", {})
    rollout = {"stop_strings": list("abcdefghij "), "prompts_per_step": 6, "max_new_tokens": 40} | sections.pop(
        "rollout", {}
    )
    run = {"folder": str(home / "run"), "overwrite": True, "seed": 1}
    sections = {"speculation": {"look_ahead": 0}} | sections
    return tiny_config(home, reward=reward, rollout=rollout, cluster=cluster, train=settings, run=run, **sections)


def early_share(config: Config) -> list[float]:
    return [line["update"]["early"] for line in read_metrics(Path(config.run.folder))]


@pytest.fixture(scope="module")
def off(home: Path) -> tuple[str, Any]:
    config = config_of(home, train={"early_update": False})
    digest, learned, pool = train(config)
    assert early_share(config) == [0.0] * STEPS
    assert "early_update" not in {method for _, method in pool.log}
    return digest, learned


def test_the_policy_is_that_of_an_update_after_the_rollout(home: Path, off: Any) -> None:
    config = config_of(home)
    turn = count()
    digest, learned, pool = train(config, lambda n: next(turn))
    print(early_share(config), [w for w, m in pool.log if m == "early_update"])
    assert (digest, learned) == off
    assert min(early_share(config)) > 0.1
