"""Serial training: on as many tokens as each step is given, counted anew in each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tlt.bench.serial import SerialRollout
from tlt.cluster.remote import ClusterRollout
from tlt.draft.gate import SpotReport
from tlt.draft.guard import Guard


def test_each_step_trains_on_its_own_tokens() -> None:
    """Ten a call: 25 are 3 calls, 5 are one."""
    life: Any = SimpleNamespace(tokens=0, about_to_train=lambda worker: [], idle=lambda workers: [])
    life.trained = lambda worker, report: setattr(life, "tokens", life.tokens + report.tokens)
    drafter: Any = SimpleNamespace(life=life, do=lambda actions: None)
    rollout = SerialRollout.__new__(SerialRollout)
    rollout.tokens, rollout.coordinator = (25, 5), SimpleNamespace(tracers=[], drafter=Guard(drafter))  # pyright: ignore
    rollout.crew = SimpleNamespace(size=1, everyone=lambda *asked: {0: SpotReport(1, 10, 0.1)})  # pyright: ignore
    trained = []
    with patch.object(ClusterRollout, "sync"):
        for version in (1, 2):
            rollout.sync(None, version)
            trained.append(life.tokens)
    assert trained == [30, 40]
