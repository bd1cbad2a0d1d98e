"""Schedule of the learned drafter's training.

Training proceeds in stretches of at least 32 micro-batches. The candidate is the running mean of the trained weights.
After each stretch it is compared with the drafter in use on held-out data, which are hidden states of the last finished
rollout. Training uses only older rollouts. The candidate is published (replaces the drafter in use) if it decodes the
held-out data in 2 % fewer rounds.

    burst   training may use all idle time (a single idle worker trains and looks ahead in turns), until the last 16
            candidates saved less than these 2 % on average
    rest    training may use 2 % of the rollouts' time

Other idle time is left for look-ahead. A burst begins when training starts from random weights and when the task
changes. A run that starts with a trained drafter begins at rest. A publication at rest does not end the rest.

The task has changed if the acceptance rate of two rollouts in a row is below 0.8 of its running mean. Then older
training data are dropped.

This module does not import torch or Ray, and does not read a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import Any, Generic, NamedTuple, TypeVar


@dataclass(frozen=True)
class Rule:
    """Constants of the schedule of drafter training."""

    stretch: int = 32
    """Number of micro-batches between two evaluations. One evaluation takes as long as about five micro-batches."""
    judged: int = 4
    """number of micro-batches of held-out data on which a candidate is evaluated"""
    better: float = 1.02
    """minimum of (rounds of the drafter in use) / (rounds of a candidate) for its publication, and on average for the
    burst to continue"""
    burst: int = 16
    """number of last candidates that decide whether the burst continues; a single evaluation errs by some percent"""
    rest_share: float = 0.02
    """Seconds of training at rest, summed over all workers, per second of rollout. Training slows another worker on the
    same CPU by 8 to 17 %, so a rollout loses less than 1 %. If each worker has its own device, it loses nothing."""
    averaged: int = 8
    """number of rollouts in the running mean of the drafter's acceptance rate"""
    fallen: float = 0.8
    """A rollout counts as fallen if its acceptance rate is below this fraction of the running mean."""
    times: int = 2
    """number of fallen rollouts in a row after which the task counts as changed"""


RULE = Rule()
Due = Enum("Due", "TRAIN EVALUATE")


class SpotReport(NamedTuple):
    """Amount of training in one call: micro-batches, tokens, and duration in seconds."""

    micro_batches: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Evaluation(NamedTuple):
    """Comparison of a candidate with the drafter in use, on the same held-out data."""

    entries: int = 0
    """number of held-out tokens that both drafters were evaluated on"""
    in_use: float = 0.0
    """expected number of rounds in which the drafter in use would decode these tokens"""
    candidate: float = 0.0
    """expected number of rounds in which the candidate would decode them; NaN if its outputs are not finite"""
    first: float = 0.0
    """expected number of the candidate's rounds in which the first draft token is accepted"""
    interrupted: bool = False
    """whether the evaluation ended before all held-out data were compared"""
    seconds: float = 0.0

    @property
    def gain(self) -> float:
        """(rounds of the drafter in use) / (rounds of the candidate) - 1; 0 if this is not a finite number"""
        gain = self.in_use / self.candidate - 1.0 if self.candidate > 0.0 else 0.0
        return gain if math.isfinite(gain) else 0.0

    @property
    def acceptance(self) -> float:
        """Acceptance rate of the candidate's first draft token."""
        return self.first / self.candidate if self.candidate > 0.0 else 0.0


def sum_evaluations(parts: Iterable[Evaluation]) -> Evaluation:
    """Return the sum of evaluations on different parts of the held-out data."""
    columns = list(zip(*parts, strict=True)) or [()] * 6
    entries, in_use, candidate, first, interrupted, seconds = columns
    return Evaluation(sum(entries), sum(in_use), sum(candidate), sum(first), any(interrupted), sum(seconds))


class Schedule:
    """State of the schedule. Its methods record events of the run; `due` returns what an idle worker should do next."""

    def __init__(self, micro_batch_tokens: int, rule: Rule | None = None, begins_at_rest: bool = False) -> None:
        self.rule = rule or RULE
        self.wanted = self.rule.judged * micro_batch_tokens
        """number of held-out tokens with which an interrupted evaluation counts as complete"""
        self.micro_batches = 0
        """number of micro-batches so far in the current stretch"""
        self.evaluation = Evaluation()
        """sum of the interrupted evaluations of the current candidate"""
        self.rests = begins_at_rest
        self.gains = deque[float](maxlen=self.rule.burst)
        """gains of the burst's last candidates"""
        self.credit = 0.0
        """seconds that training may still use at rest, summed over all workers; negative if calls took longer"""
        self.acceptance: float | None = None
        """running mean of the acceptance rate over rollouts; None before the first rollout that used the drafter"""
        self.low = 0
        """number of consecutive rollouts, up to now, with an acceptance rate below `Rule.fallen` times the mean"""

    def due(self) -> Due | None:
        """Return whether an idle worker should train or evaluate the drafter next; None if it should do other work."""
        if self.rests and self.credit <= 0.0:
            return None
        return Due.EVALUATE if self.micro_batches >= self.rule.stretch else Due.TRAIN

    def trained(self, report: SpotReport) -> None:
        self.micro_batches += report.micro_batches
        self._spend(report.seconds)

    def evaluated(self, part: Evaluation) -> Evaluation | None:
        """Add a part of the candidate's evaluation. If the evaluation is complete, begin the next stretch and return
        the whole evaluation. Otherwise return None."""
        self._spend(part.seconds)
        whole = sum_evaluations([self.evaluation._replace(interrupted=False), part])
        if part.interrupted and whole.entries < self.wanted:
            self.evaluation = whole
            return None
        self.begin_stretch()
        if not self.rests:
            self.gains.append(whole.gain)
            self.rests = len(self.gains) == self.rule.burst and fmean(self.gains) < self.rule.better - 1.0
        return whole

    def _spend(self, seconds: float) -> None:
        if self.rests:
            self.credit -= seconds

    def publishes(self, whole: Evaluation) -> bool:
        """Return whether the candidate saves enough rounds to be published."""
        return whole.gain > self.rule.better - 1.0

    def rollout_ended(self, seconds: float, acceptance: float | None) -> bool:
        """Record a rollout's duration in seconds and the drafter's acceptance rate (None: the drafter was not used).
        Return whether the task has changed."""
        self.credit = min(self.credit, 0.0) + self.rule.rest_share * seconds  # unused time expires
        if acceptance is None:
            return False
        if self.acceptance is None:
            self.acceptance = acceptance
        self.low = self.low + 1 if acceptance < self.rule.fallen * self.acceptance else 0
        if self.low >= self.rule.times:
            self._begin_burst(acceptance)
            return True
        if not self.low:
            self.acceptance += (acceptance - self.acceptance) / self.rule.averaged
        return False

    def _begin_burst(self, acceptance: float) -> None:
        self.acceptance, self.low, self.rests = acceptance, 0, False
        self.gains.clear()
        self.begin_stretch()

    def begin_stretch(self) -> None:
        """Begin a new stretch, because the candidate was evaluated, the task changed, or the candidate was lost."""
        self.micro_batches, self.evaluation = 0, Evaluation()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the schedule's state as plain data for a checkpoint. The current stretch is not included, because a
        resumed run continues from the published drafter."""
        names = ("rests", "credit", "acceptance", "low")
        return {name: getattr(self, name) for name in names} | {"gains": list(self.gains)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state` returned. An empty dictionary changes nothing but the gains."""
        for name in state.keys() - {"gains"}:
            setattr(self, name, state[name])
        self.gains.clear()
        self.gains.extend(state.get("gains", ()))


State = TypeVar("State")


class NewestState(Generic[State]):
    """Record of the newest trainer state and of the workers that have it. At first all workers have the same state."""

    def __init__(self) -> None:
        self.state: State | None = None
        """trainer state that was last fetched from a worker; None: the state that the run began with"""
        self.holder: int | None = None
        """Worker that has trained beyond `state`; None if there is none. Only this worker may continue."""
        self._current = set[int]()  # workers whose trainer has `state`

    def is_free(self, worker: int) -> bool:
        """Return whether this worker may train: no other worker has trained beyond `state`."""
        return self.holder in (None, worker)

    def pass_to(self, worker: int) -> State | None:
        """Let this worker train next. Return the trainer state that it must load first; None if it need not load
        one."""
        assert self.is_free(worker), f"worker {self.holder} has trained further"
        if worker == self.holder or worker in self._current:
            return None
        self._current.add(worker)
        return self.state

    def trained(self, worker: int) -> None:
        self.holder = worker
        self._current.discard(worker)

    def taken(self, worker: int, state: State | None) -> None:
        """Record that `state` was fetched from a worker. Any worker can continue from it. If the worker had no valid
        state (None), workers continue from the state that was fetched before."""
        self.holder = None
        self._current.discard(worker)
        if state is not None:
            self.state, self._current = state, {worker}

    def lost(self, worker: int) -> None:
        """Record that this worker is replaced by a new one, which has the trainer state that the run began with."""
        self._current.discard(worker)
        if self.holder == worker:
            self.holder = None

    def restart(self, state: State) -> None:
        """Let all workers continue from this trainer state."""
        self.state, self.holder, self._current = state, None, set()
