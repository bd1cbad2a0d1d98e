"""The life of the learned drafter while the policy trains, as a state machine: events in, actions out.

    TRAINING    idle workers train their replicas, until there is a stretch of it to judge
    COLLECTING  the replicas of those who trained are on their way
    WAITING     their average, the candidate, waits for somebody who is idle
    JUDGING     it is compared with the drafter in use, on harvest that none of them was trained on

Then it is published if it is better. Training goes on from the average at once, whatever is thought of it. Workers that
decode are asked for next to nothing: they take a published drafter between two rounds, and the common start of training
once they are idle. A judgement that is broken off is gone on with when a worker is idle again; if a worker is lost on
the way, the candidate is given up. While the drafter rests, the one in use is looked at now and then: it may go stale.

Nothing here knows of Ray, threads or torch: replicas and candidates are whatever the driver makes of them. The drivers
are cluster/budget.py (one worker), cluster/publication.py (many) and bench/serial.py (many, between two steps).
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
    """Ask these workers for their replicas: each is to be `answered`."""

    workers: Sequence[int]


class Combine(NamedTuple):
    """Average these, which were trained from `start`, at once: `combined`."""

    replicas: Sequence[Any]
    start: Any
    """None: what the run began with"""


class Judge(NamedTuple):
    """Ask these workers; each is to be `answered`. Without a candidate the drafter in use is looked at alone."""

    workers: Sequence[int]
    candidate: Any


class Publish(NamedTuple):
    """All workers draft with the candidate, and it is saved."""

    version: int
    candidate: Any
    agreement: float


class Take(NamedTuple):
    """These workers draft with what was published before."""

    workers: Sequence[int]
    candidate: Any
    agreement: float | None


class Adopt(NamedTuple):
    """The worker trains on from the common start."""

    worker: int
    start: Any


Action: TypeAlias = Collect | Combine | Judge | Publish | Take | Adopt


@dataclass
class DrafterReport:
    """What a rollout's metrics say of the drafter."""

    version: int = 0
    accept_length: float | None = None
    """of the drafter in use, on the last whole rollout"""
    candidate: float | None = None
    """of the last candidate, on the same"""

    def numbers(self) -> dict[str, float]:
        """Those that are known."""
        return {name: float(value) for name, value in vars(self).items() if value is not None}


@dataclass
class Trial:
    """A candidate on its way, or a look at the drafter in use."""

    of: Sequence[int] = ()
    """whose replicas it is made of"""
    seconds: float = 0.0
    """of training since the candidate before"""
    candidate: Any = None
    judged: Judgement = field(default_factory=Judgement)


class Lifecycle:
    """Of a drafter that so many workers train, in micro-batches of so many tokens. Events are its methods."""

    def __init__(self, gate: TrainingGate, workers: int, micro_batch_tokens: int) -> None:
        self.gate, self.workers, self.stage = gate, range(workers), Stage.TRAINING
        self.wanted = gate.thresholds.judged * micro_batch_tokens
        """entries that a candidate is judged by"""
        self.version = self.tokens = 0
        """of the drafter, one more per publication; and entries trained on, in the whole run"""
        self.report = DrafterReport()
        """of the rollout under way"""
        self.in_use: tuple[Any, float | None] | None = None
        """what was published last, and its agreement"""
        self._trial, self._answers = Trial(), dict[int, Any]()
        self._awaited: set[int] = set()  # workers that are still to answer, be it to what was given up
        self._micro_batches, self._seconds = 0, 0.0  # of training that is in no candidate yet
        self._start: Any = None  # of training, where it is no longer the run's own
        self._behind: set[int] = set()  # workers that have not taken it
        self._ahead: set[int] = set()  # and those that have trained since
        self._looked = False  # at the drafter in use, in this rollout
        self._trained_now = 0.0  # seconds, in this rollout
        self._looking = 0.0  # seconds that looks have taken beyond what they may, or may still take in this rollout

    # -- what happened -------------------------------------------------------------------------------------------------

    def rollout_begins(self) -> None:
        """There is harvest that no drafter was judged on yet."""
        self.report, self._looked, self._trained_now = DrafterReport(self.version), False, 0.0

    def rollout_ends(self, horizon: Horizon, costs: Sequence[RoundCosts] = ()) -> None:
        """`costs`: of its rounds, as far as the tuner knows them."""
        worker_seconds = horizon.rollout_seconds * len(self.workers)
        self._looking = max(0.0, self._looking) - self.gate.thresholds.looks * worker_seconds
        self.gate.rollout_ended(horizon, costs, self._trained_now)
        self._trained_now = 0.0

    def trained(self, worker: int, report: SpotReport) -> None:
        self._trained_now += report.seconds
        if worker not in self._behind:  # else it is to go on from elsewhere
            self._ahead.add(worker)
            self._micro_batches += report.micro_batches
            self._seconds += report.seconds
        self.tokens += report.tokens
        self.gate.trained_for(report)

    def answered(self, worker: int, answer: Any) -> None:
        """None where it has nothing to say."""
        self._awaited.discard(worker)
        if answer is not None:
            self._answers[worker] = answer

    def combined(self, candidate: Any) -> None:
        self._trial.candidate = candidate
        self._train_on_from(candidate, self._trial.of)

    def lost(self, worker: int) -> None:
        """Answers that are still to come are of no use."""
        self.stage = Stage.TRAINING
        self._awaited.discard(worker)
        self._ahead.discard(worker)

    def replaced(self, worker: int) -> list[Action]:
        """By a new one with the drafter that the run began with."""
        if self._start is not None:
            self._behind.add(worker)
        return [Take([worker], *self.in_use)] if self.in_use else []

    def restored(self, version: int, candidate: Any, agreement: float | None) -> list[Action]:
        """From disk: what was published last."""
        self.version, self.in_use = version, (candidate, agreement)
        self._train_on_from(candidate, of=())
        return [Take(self.workers, candidate, agreement)]

    def about_to_train(self, worker: int) -> list[Action]:
        if worker not in self._behind:
            return []
        self._behind.discard(worker)
        return [Adopt(worker, self._start)]

    def idle(self, workers: Sequence[int]) -> list[Action]:
        """These have nothing else to do: is anything due? To be asked again until nothing is."""
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

    # -- from stage to stage -------------------------------------------------------------------------------------------

    def _ask(self, stage: Stage, action: Collect | Judge) -> list[Action]:
        self.stage, self._answers, self._awaited = stage, {}, set(action.workers)
        return [action]

    def _begin(self, idle: Sequence[int]) -> list[Action]:
        """A candidate, if enough was trained; a look at the drafter in use where nothing is, as it would not pay."""
        if self._micro_batches >= self.gate.thresholds.stretch and self._ahead:
            self._trial = Trial(sorted(self._ahead), self._seconds)
            self._micro_batches, self._seconds, self._ahead = 0, 0.0, set()
            return self._ask(Stage.COLLECTING, Collect(self._trial.of))
        if not self._looked and self._looking < 0.0 and not self.gate.should_train():
            self._looked, self._trial = True, Trial()
            return self._judge(idle)
        return []

    def _combine(self) -> list[Action]:
        if not self._answers:  # none is finite: they train again from the drafter in use
            self.stage = Stage.TRAINING
            return []
        self.stage = Stage.WAITING
        return [Combine(list(self._answers.values()), self._start)]

    def _judge(self, idle: Sequence[int]) -> list[Action]:
        return self._ask(Stage.JUDGING, Judge(idle, self._trial.candidate))

    def _weigh(self, idle: Sequence[int]) -> list[Action]:
        """All that is known of the candidate by now: is it enough to go by?"""
        trial, now = self._trial, summed(self._answers.values())
        if trial.candidate is None:
            self._looking += now.seconds
        trial.judged = summed([trial.judged, now])._replace(broken_off=False)
        if now.broken_off and trial.judged.entries < self.wanted:
            return self._judge(idle)
        return self._decide()

    def _decide(self) -> list[Action]:
        self.stage, trial, judged = Stage.TRAINING, self._trial, self._trial.judged
        if not judged.entries:
            self._seconds += trial.seconds  # it is a part of the next candidate
            return []
        in_use = judged.entries / judged.in_use
        if self.report.accept_length is None:
            self.gate.fresh(in_use)
        self.report.accept_length = in_use
        if trial.candidate is None:
            return []
        self.report.candidate = judged.entries / judged.candidate
        self.gate.gained(in_use, self.report.candidate, trial.seconds, judged.is_better)
        if not judged.is_better:
            return []
        self.version += 1
        self.report.version, self.in_use = self.version, (trial.candidate, judged.first / judged.candidate)
        return [Publish(self.version, *self.in_use)]

    def _train_on_from(self, start: Any, of: Sequence[int]) -> None:
        """All go on from there; who has trained it all alone stands there, or further on."""
        self._start, self._ahead = start, set()
        self._behind = set(self.workers) - (set(of) if len(of) == 1 else set())

    # -- the checkpoint's part -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data; the drafter itself is saved by its driver, and comes back as `restored`."""
        return {"gate": self.gate.state(), "version": self.version}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.gate.load_state(state["gate"])
