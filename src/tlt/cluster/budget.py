"""One worker is never idle: its drafter is trained between rollouts instead, for a share of their seconds, while that
pays back. Nothing that goes wrong here costs more than speed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tlt.config import Config
from tlt.draft.average import Replica
from tlt.draft.buffer import Harvest, Transcript
from tlt.draft.gate import STRETCH, TrainingGate
from tlt.draft.saving import DrafterSaver, load_latest
from tlt.draft.spot import SpotTrainer
from tlt.engine.protocol import RolloutEngine

log = logging.getLogger(__name__)
T = TypeVar("T")

_SLICE = 0.5  # seconds of idle time, after which there may be enough to judge by


class Budget:
    """Trains the drafter which the engine begins with; saves what is published in the run's folder. The engine gives
    its harvest to `harvest`."""

    def __init__(self, trainer: SpotTrainer, config: Config) -> None:
        training, layer = config.speculation.training, trainer.in_use
        self.trainer: SpotTrainer | None = trainer
        self.share, self.version = training.budget, 0
        self.gate = TrainingGate(training.unroll, trained=layer.trained)
        self.folder = Path(config.run.folder) / "drafter"
        self.saver = DrafterSaver(self.folder, layer.options)
        self.micro_batches, self.seconds = 0, 0.0  # of training that was not judged yet

    def harvest(self, item: Harvest | Transcript) -> None:
        self._guarded(lambda trainer: trainer.harvest(item))

    def spend(self, engine: RolloutEngine) -> None:
        """After a rollout of the engine: what was done is written in its stats."""
        began, stats = time.perf_counter(), engine.stats
        if self.trainer:
            stats.spot = self._guarded(lambda trainer: self._train(trainer, engine)) or {}
            stats.seconds["spot"] = time.perf_counter() - began

    def spend_idle(self, engine: RolloutEngine, is_over: Callable[[], bool]) -> None:
        """Train and judge until it is over; what was done is added to the engine's stats."""
        if self.trainer:
            began = time.perf_counter()
            self._guarded(lambda trainer: self._train_idly(trainer, engine, is_over))
            engine.stats.seconds["spot"] = time.perf_counter() - began

    def _train_idly(self, trainer: SpotTrainer, engine: RolloutEngine, is_over: Callable[[], bool]) -> None:
        if not self.gate.should_train():
            self._settle(trainer, engine, is_over)  # it may have gone stale
        while self.gate.should_train() and not is_over():
            report = trainer.train(_SLICE, is_over)
            if not report.micro_batches:
                return
            engine.stats.drafter_tokens += report.tokens
            self.micro_batches += report.micro_batches
            self.seconds += report.seconds
            if self.micro_batches >= STRETCH:
                self._settle(trainer, engine, is_over)

    def _guarded(self, act: Callable[[SpotTrainer], T]) -> T | None:
        if self.trainer is None:
            return None
        try:
            return act(self.trainer)
        except Exception:
            log.exception("the drafter's training failed; going on without")
            self.trainer = None
            return None

    def _train(self, trainer: SpotTrainer, engine: RolloutEngine) -> dict[str, float]:
        stats = engine.stats
        rollout_seconds = sum(stats.seconds.values())
        facts = {"version": float(self.version)}
        if self.gate.pays_back(rollout_seconds):
            report = trainer.train(self.share * rollout_seconds)
            stats.drafter_tokens = report.tokens
            self.micro_batches += report.micro_batches
            self.seconds += report.seconds
            if self.micro_batches < STRETCH:
                return facts
        return facts | self._settle(trainer, engine)

    def _settle(
        self, trainer: SpotTrainer, engine: RolloutEngine, is_over: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Judge what was trained, and publish it where it is better; unless that is over before it is judged."""
        facts: dict[str, float] = {}
        replica = trainer.replica() if self.micro_batches else None
        judged = trainer.judge(replica.tensors if replica else None, stop=is_over)
        if judged.broken_off:
            return facts
        if judged.entries:
            facts["accept_length"] = judged.in_use / judged.entries
            self.gate.fresh(facts["accept_length"])
        if judged.entries and replica:
            facts["candidate"] = judged.candidate / judged.entries
            self.gate.gained(facts["accept_length"], facts["candidate"], self.seconds)
            self.micro_batches, self.seconds = 0, 0.0
            if judged.is_better:
                self._publish(engine, trainer, replica, judged.first / judged.entries)
                facts["version"] = float(self.version)
        return facts

    def _publish(self, engine: RolloutEngine, trainer: SpotTrainer, replica: Replica, agreement: float) -> None:
        layer = trainer.publish(replica.tensors, agreement)
        engine.draft_with(layer)
        self.version += 1
        self.saver.save(self.version, replica, agreement)

    def target_moved(self) -> None:
        self._guarded(lambda trainer: trainer.target_moved())

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint; the drafter itself lies in `folder`."""
        return {"gate": self.gate.state(), "version": self.version}

    def load_state(self, state: Mapping[str, Any], engine: RolloutEngine) -> None:
        """Go on with the drafter that was published last, in the engine too."""
        self._guarded(lambda trainer: self._take_up(trainer, state, engine))

    def _take_up(self, trainer: SpotTrainer, state: Mapping[str, Any], engine: RolloutEngine) -> None:
        self.gate.load_state(state["gate"])
        if saved := load_latest(self.folder, trainer.target.options):
            self.version = saved.number
            trainer.adopt(saved.replica)
            layer = trainer.publish(saved.replica.tensors, saved.layer.agreement)
            engine.draft_with(layer)
