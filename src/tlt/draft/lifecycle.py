"""The life of the learned drafter while the policy trains, as a state machine: events in, actions out.

    TRAINING    idle workers train their replicas, until there is a stretch of training to judge or an update begins
    COLLECTING  the replicas of the workers that trained are awaited
    WAITING     their average, the candidate, waits for an idle worker
    JUDGING     the candidate is compared with the drafter in use, on harvest that neither was trained on

Then the candidate is published if it is better. Training goes on from the average at once, whatever the judgement.
Two replicas that train side by side learn less than one that trains as long as both. So where workers are idle in turn,
each goes on from where the one before it stopped.
Workers that decode are hardly disturbed: they take a published drafter between two rounds, and the common start of
training once they are idle. A judgement that was broken off goes on when a worker is idle again; if a worker is lost
before its end, the candidate is given up. While nothing is trained, and where rollouts suddenly are slow, the drafter
in use is judged alone (a look), as it may go stale.

Nothing here knows of Ray, threads or torch: replicas and candidates are whatever the driver makes of them. The drivers
are cluster/budget.py (one worker), cluster/publication.py (many) and tlt/bench/serial.py (many, between two steps).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from tlt.draft.gate import Judgement, SpotReport, TrainingGate, summed
from tlt.draft.horizon import Horizon, RoundCosts

Stage = Enum("Stage", "TRAINING COLLECTING WAITING JUDGING")


class Collect(NamedTuple):
    """Ask these workers for their replicas; each of them must be `answered`."""

    workers: Sequence[int]


class Combine(NamedTuple):
    """Average these replicas, which were trained from `start`, and call `combined` at once."""

    replicas: Sequence[Any]
    start: Any
    """None: the state that the run began with"""


class Judge(NamedTuple):
    """Ask these workers for judgements; each must be `answered`. Without a candidate this is a look."""

    workers: Sequence[int]
    candidate: Any


class Publish(NamedTuple):
    """All workers draft with the candidate from now on, and it is saved."""

    version: int
    candidate: Any
    agreement: float


class Take(NamedTuple):
    """These workers draft with the drafter that was published before."""

    workers: Sequence[int]
    candidate: Any
    agreement: float | None


class Adopt(NamedTuple):
    """The worker goes on training from the common start."""

    worker: int
    start: Any


class Forget(NamedTuple):
    """These workers no longer train on rollouts before the last finished one."""

    workers: Sequence[int]


Action: TypeAlias = Collect | Combine | Judge | Publish | Take | Adopt | Forget


@dataclass
class DrafterReport:
    """What is known of the drafter in a rollout."""

    version: int = 0
    """of the drafter in use; 0: the one that the run began with"""
    accept_length: float | None = None
    """of the drafter in use, judged on the last finished rollout"""
    candidate: float | None = None
    """accept length of the last candidate, on the same rollout"""

    def numbers(self) -> dict[str, float]:
        """The numbers that are known."""
        return {name: float(value) for name, value in vars(self).items() if value is not None}


@dataclass
class Trial:
    """A candidate on its way, or a look at the drafter in use."""

    of: Sequence[int] = ()
    """workers whose replicas it is made of"""
    candidate: Any = None
    judged: Judgement = field(default_factory=Judgement)
    is_late: bool = False
    """whether the target has moved since its judgement began"""


class Lifecycle:
    """The state machine of a drafter that `workers` workers train. Events are its methods; many return actions."""

    def __init__(self, gate: TrainingGate, workers: int, micro_batch_tokens: int) -> None:
        self.gate, self.workers, self.stage = gate, range(workers), Stage.TRAINING
        self.wanted = gate.thresholds.judged * micro_batch_tokens
        """entries that a candidate is judged on"""
        self.version = self.tokens = 0
        """drafter version, one more per publication; and entries trained on in the whole run"""
        self.report = DrafterReport()
        """report on the current rollout"""
        self.in_use: tuple[Any, float | None] | None = None
        """the drafter published last, and its agreement"""
        self._trial, self._answers = Trial(), dict[int, Any]()
        self._awaited: set[int] = set()  # workers that have not answered yet, even if their trial was given up
        self._micro_batches = 0  # those that are in no candidate yet
        self._start: Any = None  # common start of training; None: the state that the run began with
        self._behind: set[int] = set()  # workers that have not adopted it
        self._ahead: set[int] = set()  # workers that have trained since
        self._target: int | None = None  # target version of this rollout
        self._looked = False  # whether there was a look in this rollout
        self._trained_now = 0.0  # seconds of training in this rollout
        self._looking = 0.0  # seconds of looks less those that they may take: below 0, another one may begin

    # -- what happened -------------------------------------------------------------------------------------------------

    def rollout_begins(self, target: int) -> None:
        """If this is the first rollout by this version of the target, there is a new whole harvest, and no drafter was
        judged on it yet. What is under way comes too late to say how good the drafter in use is now; a candidate's
        judgement goes on, as it compares."""
        if target == self._target:
            return
        self._target, self._looked = target, False
        self.report = DrafterReport(self.version if self.in_use else 0)
        self._trial.is_late = self.stage is Stage.JUDGING

    def rollout_ends(self, horizon: Horizon, costs: Sequence[RoundCosts] = ()) -> None:
        """A rollout has ended; `costs` are those of its rounds, as far as the tuner knows them."""
        worker_seconds = horizon.rollout_seconds * len(self.workers)
        self._looking = max(0.0, self._looking) - self.gate.looks_may_take() * worker_seconds
        self.gate.rollout_ended(horizon, costs, self._trained_now)
        self._trained_now = 0.0

    def held_up(self, seconds: float) -> None:
        """Workers caught up for so many seconds, while nothing was decoded: what they trained took no idle time."""
        self.gate.held_up(seconds, self._trained_now)
        self._trained_now = 0.0

    def update_begins(self) -> list[Action]:
        """No worker trains until the next rollout. Whoever is idle first in it goes on from what was trained so far."""
        if self.stage is not Stage.TRAINING or not self._ahead or len(self.workers) == 1:
            return []
        return self._collect()

    def trained(self, worker: int, report: SpotReport) -> None:
        self._trained_now += report.seconds
        if report.micro_batches and worker not in self._behind:  # else it is to go on from elsewhere
            self._ahead.add(worker)
            self._micro_batches += report.micro_batches
        self.tokens += report.tokens
        self.gate.trained_for(report)

    def answered(self, worker: int, answer: Any) -> None:
        """A worker answered a `Collect` or `Judge`; None if it has no answer."""
        self._awaited.discard(worker)
        if answer is not None:
            self._answers[worker] = answer

    def combined(self, candidate: Any) -> None:
        self._trial.candidate = candidate
        self._train_on_from(candidate, self._trial.of)

    def lost(self, worker: int) -> None:
        """A worker was lost. A candidate that waits or is judged is given up, and answers still to come are of no use;
        while replicas are collected, those of the others are enough."""
        if self.stage is Stage.COLLECTING:
            self._trial.of = ()  # whoever trained it alone may be the one that is lost
        else:
            self.stage = Stage.TRAINING
        self._awaited.discard(worker)
        self._ahead.discard(worker)

    def replaced(self, worker: int) -> list[Action]:
        """A new worker, with the drafter that the run began with, took the place of a lost one."""
        if self._start is not None:
            self._behind.add(worker)
        return [Take([worker], *self.in_use)] if self.in_use else []

    def restored(self, version: int, candidate: Any, agreement: float | None) -> list[Action]:
        """The drafter that was published last was loaded from disk."""
        self.version, self.in_use = version, (candidate, agreement)
        self._train_on_from(candidate, of=())
        return [Take(self.workers, candidate, agreement)]

    def about_to_train(self, worker: int) -> list[Action]:
        if worker not in self._behind:
            return []
        self._behind.discard(worker)
        return [Adopt(worker, self._start)]

    def idle(self, workers: Sequence[int]) -> list[Action]:
        """These workers are idle. Returns what is due; call it again until that is nothing."""
        if self._awaited:
            return []
        match self.stage:
            case Stage.COLLECTING:
                return self._combine()
            case Stage.WAITING:
                return self._judge(workers)
            case Stage.JUDGING:
                return self._weigh(workers)
            case _:
                return self._begin(workers)

    def numbers(self) -> dict[str, float]:
        """What a rollout's metrics say of the drafter: the report, and the seconds that more training is predicted to
        save in the steps that remain, less its costs, or 0 if it rests."""
        decision = self.gate.decision
        saves = {"saves": decision.saves if decision.trains else 0.0} if decision else {}
        return self.report.numbers() | saves

    # -- from stage to stage -------------------------------------------------------------------------------------------

    def _ask(self, stage: Stage, action: Collect | Judge) -> list[Action]:
        self.stage, self._answers, self._awaited = stage, {}, set(action.workers)
        return [action]

    def _begin(self, idle: Sequence[int]) -> list[Action]:
        """Begin a candidate if enough was trained, or a look: where the last rollout was far slower than it should be,
        and now and then where training would not pay."""
        if self._micro_batches >= self.gate.thresholds.stretch and self._ahead:
            return self._collect()
        is_due = self.gate.surprised or (self._looking < 0.0 and not self.gate.should_train())
        if is_due and not self._looked and self.report.accept_length is None:
            self._looked, self._trial = True, Trial()
            return self._judge(idle)
        return []

    def _collect(self) -> list[Action]:
        self._trial, self._ahead = Trial(sorted(self._ahead)), set()
        return self._ask(Stage.COLLECTING, Collect(self._trial.of))

    def _combine(self) -> list[Action]:
        """Average the replicas. After a whole stretch of training, the average is a candidate."""
        self.stage = Stage.TRAINING
        if not self._answers:  # no replica is finite: workers train again from the drafter in use
            self._micro_batches = 0
            self._train_on_from(self.in_use[0] if self.in_use else None, self._trial.of)
            return []
        if self._micro_batches >= self.gate.thresholds.stretch:
            self.stage, self._micro_batches = Stage.WAITING, 0
        return [Combine(list(self._answers.values()), self._start)]

    def _judge(self, idle: Sequence[int]) -> list[Action]:
        return self._ask(Stage.JUDGING, Judge(idle, self._trial.candidate))

    def _weigh(self, idle: Sequence[int]) -> list[Action]:
        """Add the answers to the judgement. If it was broken off before enough entries were judged, go on with it; else
        decide."""
        trial, now = self._trial, summed(self._answers.values())
        if trial.candidate is None:
            self._looking += now.seconds
            if trial.is_late:
                self.stage = Stage.TRAINING
                return self._begin(idle)
        trial.judged = summed([trial.judged, now])._replace(broken_off=False)
        if now.broken_off and trial.judged.entries < self.wanted:
            return self._judge(idle)
        return self._decide()

    def _decide(self) -> list[Action]:
        self.stage, trial, judged = Stage.TRAINING, self._trial, self._trial.judged
        if not judged.entries:
            return []
        in_use = judged.entries / judged.in_use
        is_fresh = self.report.accept_length is None and not trial.is_late
        actions: list[Action] = [Forget(self.workers)] if is_fresh and self.gate.fresh(in_use) else []
        if not trial.is_late:
            self.report.accept_length = in_use
        if trial.candidate is None:
            return actions
        candidate, is_better = judged.entries / judged.candidate, judged.is_better(self.gate.thresholds.better)
        self.report.candidate = candidate if candidate > 0.0 else None  # it may not be finite
        self.gate.gained(in_use, candidate, judged.seconds, is_better)
        if not is_better:
            return actions
        self.version += 1
        self.report.version, self.in_use = self.version, (trial.candidate, judged.first / judged.candidate)
        return [*actions, Publish(self.version, *self.in_use)]

    def _train_on_from(self, start: Any, of: Sequence[int]) -> None:
        """All workers go on training from `start`, except one that trained it alone: it is there, or further on. None:
        from the state that the run began with, as far as they have not trained."""
        self._start, self._ahead = start, set()
        self._behind = set(self.workers) - (set(of) if len(of) == 1 else set()) if start is not None else set()

    # -- the checkpoint's part -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data. The driver saves the drafter itself, and gives it back with `restored`."""
        return {"gate": self.gate.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The state of a run that had no drafter to train may be empty."""
        self.gate.load_state(state.get("gate", {}))
