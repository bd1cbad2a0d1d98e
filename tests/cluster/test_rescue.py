"""Runs with two workers that end early: finished steps are saved, and the message is true."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pools import ThreadWorker
from test_coordinator import STEPS, train
from test_coordinator import config_of as workers

from tlt.cluster.remote import ClusterPolicy, ClusterRollout
from tlt.config import Config
from tlt.rl.parallel import ProcessGroup
from tlt.rl.policy import Policy
from tlt.run.record import Record
from tlt.stopping import Stopped
from tlt.store import checkpoint
from tlt.store.checkpoint import CheckpointError
from tlt.types import TrainBatch


def config_of(home: Path, stop_within: float = 60.0) -> Config:
    return workers(home, 2, run={"save_every": 0, "stop_within": stop_within})


def saved(config: Config) -> list[str]:
    return sorted(path.name for path in (Path(config.run.folder) / "checkpoints").glob("step_*"))


def before(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, do: Callable[..., None]) -> None:
    """Call `do` with the arguments before each call of this method."""
    real = getattr(owner, name)

    def both(self: Any, *arguments: Any, **named: Any) -> Any:
        do(self, *arguments, **named)
        return real(self, *arguments, **named)

    monkeypatch.setattr(owner, name, both)


def asked_to_stop(seconds: float) -> None:
    """Send SIGTERM to this process, and sleep for this many seconds."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)


def ends_with_an_error_and_is_saved(config: Config) -> None:
    """Check the end of a run that runs out of memory in its second step."""
    with pytest.raises(MemoryError) as ended:
        train(config, choose=lambda count: count - 1)
    assert "saved after step 1 in" in " ".join(ended.value.__notes__)
    assert saved(config) == ["step_00000001"]


@pytest.mark.parametrize(("amid", "which"), [("decode", (0, 1)), ("update", (0,)), ("update", (0, 1))])
def test_workers_that_raise_lose_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amid: str, which: tuple[int, ...]
) -> None:
    config = config_of(tmp_path)

    def decodes(worker: ThreadWorker, *arguments: Any) -> None:
        if worker.target.version == 1 and worker.index in which:
            raise MemoryError("out of memory")

    def updates(policy: Policy, batch: TrainBatch, step: int, group: ProcessGroup) -> None:
        if step == 1 and group.rank in which:
            raise MemoryError("out of memory")

    owner, does = (ThreadWorker, decodes) if amid == "decode" else (Policy, updates)
    before(monkeypatch, owner, amid, does)
    ends_with_an_error_and_is_saved(config)


def test_a_signal_does_not_disturb_the_save_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, stop_within=0.1)

    def runs_out(rollout: ClusterRollout, *arguments: Any) -> None:
        if rollout.coordinator._version == 1:
            raise MemoryError("out of memory")

    before(monkeypatch, ClusterRollout, "generate", runs_out)
    before(monkeypatch, ClusterPolicy, "save", lambda policy, folder: asked_to_stop(0.3))
    ends_with_an_error_and_is_saved(config)


def test_a_signal_does_not_disturb_the_end_of_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, stop_within=0.1)
    before(monkeypatch, ClusterRollout, "close", lambda rollout: asked_to_stop(0.3))
    train(config)
    assert (Path(config.run.folder) / "summary.json").is_file()


def test_a_step_with_a_finished_update_is_not_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, stop_within=0.4)
    asked: list[int] = []

    def syncs(rollout: ClusterRollout, policy: Any, version: int) -> None:
        if version == 1 and not asked:
            asked.append(version)
            asked_to_stop(0.6)

    before(monkeypatch, ClusterRollout, "sync", syncs)
    with pytest.raises(Stopped, match=rf"saved after step 1 of {STEPS}"):
        train(config)
    assert saved(config) == ["step_00000001"]


@pytest.mark.parametrize("room", [True, False])
def test_a_step_reported_as_saved_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    """The signal arrives after the check whether a save is due."""
    config = config_of(tmp_path)

    def asks(record: Record, result: Any) -> None:
        if result.metrics.step == 1:
            asked_to_stop(0.0)

    def full(*arguments: Any) -> None:
        raise CheckpointError("no space left on device")

    before(monkeypatch, Record, "write", asks)
    if not room:
        monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(Stopped if room else CheckpointError, match="saved after step 1" if room else "no space left"):
        train(config)
    assert saved(config) == ["step_00000001"] * room
