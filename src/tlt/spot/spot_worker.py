"""Drafter training on one worker, behind a fault barrier. `cluster/drafter_training.py` calls it.

An error in drafter training is logged and makes the run slower, but does not end it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from tlt.draft.eagle import EagleLayer
from tlt.draft.features import Harvest
from tlt.spot.saving import TrainerState
from tlt.spot.schedule import Evaluation, SpotReport
from tlt.spot.spot import SpotTrainer

log = logging.getLogger(__name__)
Owner = TypeVar("Owner", bound="FaultBarrier")
P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")
Stop = Callable[[], bool]


class FaultBarrier:
    """Base class of objects that are switched off after one of their `contained` methods has raised."""

    is_on = True
    passes_on: tuple[type[Exception], ...] = ()
    """exceptions that `contained` methods raise as usual, because they concern the run itself"""

    def switch_off(self) -> None:
        self.is_on = False


def contained(default: D) -> Callable[[Callable[Concatenate[Owner, P], R]], Callable[Concatenate[Owner, P], R | D]]:
    """Decorate a method of a `FaultBarrier`. If the method raises, the error is logged and the barrier is switched off.
    From then on the method does nothing and returns `default`."""

    def decorate(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R | D]:
        @wraps(method)
        def called(self: Owner, *arguments: P.args, **named: P.kwargs) -> R | D:
            if not self.is_on:
                return default
            try:
                return method(self, *arguments, **named)
            except self.passes_on:
                raise
            except Exception:
                log.exception("drafter training failed; the run continues without it")
                self.switch_off()
                return default

        return called

    return decorate


class SpotWorker(FaultBarrier):
    """Drafter training of one worker. `trainer` is None if no drafter is trained. `draft_with` is a function that
    replaces the engine's drafter."""

    def __init__(self, trainer: SpotTrainer | None, draft_with: Callable[[EagleLayer], None]) -> None:
        self.trainer, self._draft_with, self.is_on = trainer, draft_with, trainer is not None

    def switch_off(self) -> None:
        super().switch_off()
        self.trainer = None  # frees its memory

    @property
    def _sound(self) -> SpotTrainer:
        assert self.trainer, "drafter training is on"
        return self.trainer

    # -- training data -------------------------------------------------------------------------------------------------

    @contained(None)
    def harvest(self, item: Harvest) -> None:
        """Add an item of training data. The engine calls this method as its `on_harvest`."""
        self._sound.harvest(item)

    @contained(None)
    def rollout_ended(self) -> None:
        """Record that the current rollout's training data are complete, before the target changes."""
        self._sound.rollout_ended()

    @contained(None)
    def target_moved(self) -> None:
        self._sound.target_moved()

    @contained(None)
    def forget_older_data(self) -> None:
        """Drop training data of rollouts before the last finished one, because the task has changed."""
        self._sound.forget()

    # -- calls of the driver -------------------------------------------------------------------------------------------

    @contained(None)
    def train_drafter(self, start: TrainerState | None, seconds: float, stop: Stop) -> SpotReport | None:
        """Train for about `seconds`, from the trainer state `start` if it is given. If `stop` returns True, end within
        a micro-batch. Return None if there are too few training data."""
        if start:
            self._sound.load_state(start)
        return self._sound.train(seconds, stop) if self._sound.ready else None

    @contained(None)
    def evaluate_drafter(self, start: TrainerState | None, stop: Stop) -> Evaluation | None:
        """Compare the drafter in training with the one in use. If `start` is given, load this trainer state first.
        Return None if there are no held-out data."""
        if start:
            self._sound.load_state(start)
        found = self._sound.evaluate(stop)
        return found if found.entries or found.interrupted else None

    @contained(None)
    def drafter_state(self) -> TrainerState | None:
        return self._sound.state()

    @contained(None)
    def take_drafter(self, state: TrainerState, acceptance: float | None) -> None:
        """Replace the engine's drafter by the published drafter, whose weights are in this trainer state. `acceptance`:
        measured acceptance rate of its first draft token; None if not known."""
        self._draft_with(self._sound.publish(state, acceptance))
