"""The drafter's life with one worker. The worker is never idle, so it trains between rollouts, for a fraction of their
seconds, as long as that pays. As one of several processes of another trainer, it trains while it waits for the
others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tlt.cluster.publication import mark_decisions
from tlt.config import Config
from tlt.draft.average import Replica
from tlt.draft.buffer import Harvest, Transcript
from tlt.draft.gate import THRESHOLDS, SpotReport, TrainingGate
from tlt.draft.guard import Guard
from tlt.draft.horizon import Horizon
from tlt.draft.lifecycle import Action, Adopt, Collect, Combine, Forget, Judge, Lifecycle, Publish, Take
from tlt.draft.saving import DrafterSaver, load_latest, newest_number
from tlt.draft.spot import SpotTrainer
from tlt.draft.strategy import LEARNED
from tlt.engine.protocol import RolloutEngine
from tlt.metrics import against_plain

_SLICE = 0.5  # seconds of training in idle time before it is asked what is due


def harvest_to(budget: Guard[Budget]) -> Callable[[Harvest | Transcript], None]:
    """The engine's `on_harvest`, which gives each item to the trainer."""
    return lambda item: budget.tell(lambda it: it.trainer.harvest(item))


def never() -> bool:
    return False


class Budget:
    """Trains the drafter that the engine begins with, and saves each published one in the run's folder. Use it through
    a `Guard` alone."""

    def __init__(self, trainer: SpotTrainer, config: Config, steps: int | None = None) -> None:
        """`steps`: number of steps of the run, if that is known."""
        training, layer = config.speculation.training, trainer.in_use
        self.steps, self.idle = steps, 1.0
        self.trainer, self.share = trainer, training.budget
        self.life = Lifecycle(TrainingGate(training.unroll, layer.trained), 1, training.micro_batch_tokens)
        self.folder = Path(config.run.folder) / "drafter"
        self.saver = DrafterSaver(self.folder, layer.options)

    def spend(self, engine: RolloutEngine) -> None:
        """Train and judge after a rollout of the engine, and write what was done into the engine's stats."""
        began, stats = time.perf_counter(), engine.stats
        self.trainer.rollout_ended()
        rollout_seconds = sum(stats.seconds.values())
        version = self.trainer.target.version
        self.life.rollout_begins(version)
        self._rollout_ends(engine, rollout_seconds, self.share * rollout_seconds, second_costs=1.0, version=version)
        if self.life.gate.should_train():
            stats.drafter_tokens = self._train(self.share * rollout_seconds, never).tokens
        self._go_on(engine, never)
        stats.spot = self.life.numbers()
        stats.seconds["spot"] = time.perf_counter() - began

    def spend_idle(self, engine: RolloutEngine, is_over: Callable[[], bool]) -> None:
        """Train and judge until the idle time is over, and add what was done to the engine's stats."""
        began, stats, can_train = time.perf_counter(), engine.stats, True
        self.life.rollout_begins(self.trainer.target.version)
        self._go_on(engine, is_over)
        while self.life.gate.should_train() and can_train and not is_over():
            report = self._train(_SLICE, is_over)
            can_train = report.micro_batches > 0
            stats.drafter_tokens += report.tokens
            self._go_on(engine, is_over)
        spent = time.perf_counter() - began
        self.idle = spent if is_over() else max(spent, self.idle)  # at rest it returns early
        # without its version: the stats of a rollout with several idle times hold the earlier ones, too
        self._rollout_ends(engine, sum(stats.seconds.values()) + self.idle, self.idle, THRESHOLDS.second_costs)
        stats.seconds["spot"] = spent

    def _rollout_ends(
        self, engine: RolloutEngine, seconds: float, idle: float, second_costs: float, version: int | None = None
    ) -> None:
        end = self.steps
        steps = THRESHOLDS.unknown_steps if end is None else max(0, end - self.trainer.target.version - 1)
        speed = against_plain([engine.stats.against_plain]).get("times", 0.0)
        horizon = Horizon(steps, seconds, idle, second_costs, speed=speed, version=version)
        self.life.rollout_ends(horizon, engine.tuner.costs(LEARNED))
        if engine.tracer:
            mark_decisions(self.life.gate, engine.tracer)

    def _train(self, seconds: float, is_over: Callable[[], bool]) -> SpotReport:
        report = self.trainer.train(seconds, is_over)
        self.life.trained(0, report)
        return report

    def _go_on(self, engine: RolloutEngine, is_over: Callable[[], bool]) -> None:
        """Do whatever is due."""
        while not is_over() and (actions := self.life.idle([0])):
            for action in actions:
                self._do(action, engine, is_over)

    def _do(self, action: Action, engine: RolloutEngine, is_over: Callable[[], bool] = never) -> None:
        match action:
            case Collect():
                self.life.answered(0, self.trainer.replica())
            case Combine(replicas=replicas):
                self.life.combined(replicas[0])
            case Judge(candidate=candidate):
                began = time.perf_counter()
                judged = self.trainer.judge(candidate.tensors if candidate else None, stop=is_over)
                self.life.answered(0, judged._replace(seconds=time.perf_counter() - began))
            case Publish(version, candidate, agreement):
                self._draft_with(candidate, agreement, engine)
                self.saver.save(version, candidate, agreement)
            case Take(_, candidate, agreement):
                self._draft_with(candidate, agreement, engine)
            case Adopt(_, start):
                self.trainer.adopt(start)
            case Forget():
                self.trainer.forget()

    def _draft_with(self, replica: Replica, agreement: float | None, engine: RolloutEngine) -> None:
        engine.draft_with(self.trainer.publish(replica.tensors, agreement))

    def number_on(self) -> None:
        """Number on from the drafters of another run in this folder: the saver keeps those with the highest numbers."""
        self.life.version = newest_number(self.folder)

    # -- the checkpoint's part -----------------------------------------------------------------------------------------

    def load_state(self, state: Mapping[str, Any], engine: RolloutEngine) -> None:
        """Restore the state, and give the drafter that was published last to the engine and to training."""
        self.number_on()
        self.take_published(engine)
        self.life.load_state(state)

    def take_published(self, engine: RolloutEngine) -> None:
        """Load the drafter that was published last, for the engine and for training."""
        if saved := load_latest(self.folder, self.trainer.target.options):
            for action in self.life.restored(saved.number, saved.replica, saved.layer.agreement):
                self._do(action, engine)
            for action in self.life.about_to_train(0):
                self._do(action, engine)
