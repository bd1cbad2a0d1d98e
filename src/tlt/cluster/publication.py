"""From replicas that idle workers trained to a drafter that all use: averaged, judged, swapped in.

A chain of calls, of which each link begins where a worker is idle: replicas of those who trained; their average, judged
against the drafter in use by those who are idle; swapped in where it is better. All train on from the average, whatever
is thought of it. Those who decode are asked for next to nothing: they take a published drafter between two rounds, and
the common start of training once they are idle themselves. A judgement that is broken off is gone on with when a worker
is idle again. Where a worker is lost on the way, the next chain starts afresh.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlt.build import starting_drafter
from tlt.cluster.crew import BREAKABLE, Crew, Done
from tlt.cluster.pool import ClusterError, Handle
from tlt.config import Config
from tlt.draft.average import Replica, average
from tlt.draft.buffer import Harvest, Transcript
from tlt.draft.gate import STRETCH, TrainingGate
from tlt.draft.guard import Guarded, guarded
from tlt.draft.saving import DrafterSaver, load_latest
from tlt.draft.spot import JUDGED, Judgement, SpotReport, summed
from tlt.models.families import decoder_options, read_config

log = logging.getLogger(__name__)

METHODS = ("replica", "judge", "evidence")
_LOOKS = 0.02  # of the workers' time in rollouts, what looks at a drafter at rest may take


@dataclass
class Chain:
    link: Callable[[Chain, list[int]], None]
    """what comes once all answers are there, with those who are idle by then"""
    answers: dict[int, Any] = field(default_factory=dict)
    """of the calls before it, by worker: those that are not None"""
    of: list[int] = field(default_factory=list)
    """whose replicas the candidate is made of"""
    seconds: float = 0.0
    """of training that went into it since the candidate before"""
    candidate: Replica | None = None
    """None: the drafter in use is looked at, and that is all"""
    given: Handle | None = None
    """the candidate, where workers can take it from"""
    judged: Judgement = field(default_factory=Judgement)
    asked: float = 0.0
    """when its last judgement began"""
    lent: list[Harvest | Transcript] = field(default_factory=list)
    """by workers that decode, where the idle ones hold nothing back"""


class Publication(Guarded):
    """What is published is saved in the run's folder. Where something fails, the drafter in use stays."""

    passes_on = (ClusterError,)

    def __init__(self, crew: Crew, config: Config) -> None:
        self.crew = crew
        self.options = decoder_options(read_config(config.model.path))
        layer = starting_drafter(config, self.options)
        self.gate = TrainingGate(config.speculation.training.unroll, trained=bool(layer and layer.trained))
        self.folder = Path(config.run.folder).resolve() / "drafter"
        self.saver = DrafterSaver(self.folder, layer.options) if layer else None
        self.version = 0
        """of the drafter: one more per publication"""
        self.in_use: tuple[Replica, float | None] | None = None
        """what was published last, and its agreement"""
        self.tokens = 0
        """entries trained on, in the whole run"""
        self.facts: dict[str, float] = {}
        """of the rollout under way: drafter version, accept lengths judged"""
        self._micro_batches, self._seconds = 0, 0.0  # of training that is in no candidate yet
        self._start: Handle | None = None  # that all train on from, once it is no longer the run's own
        self._behind: set[int] = set()  # workers that have not taken it
        self._ahead: set[int] = set()  # and those that have trained since
        self._wanted = JUDGED * config.speculation.training.micro_batch_tokens  # entries of a judgement
        self._chain: Chain | None = None
        self._looked = False  # at the drafter in use, in this rollout
        self._looking = 0.0  # seconds that looks have taken beyond what they may, or may still take in this rollout

    # -- what the coordinator asks and says ----------------------------------------------------------------------------

    @guarded(None)
    def next_rollout(self, worker_seconds: float) -> None:
        """`worker_seconds`: of all workers, in the rollout before."""
        self.facts = {"version": float(self.version)}
        self._looked = False
        self._looking = max(0.0, self._looking) - _LOOKS * worker_seconds

    @guarded(False)
    def should_train(self) -> bool:
        """`TrainingGate.should_train`."""
        return self.gate.should_train()

    @guarded(0.0)
    def saves(self, seconds: float, rollout_seconds: float) -> float:
        """`TrainingGate.saves`."""
        return self.gate.saves(seconds, rollout_seconds)

    @guarded(None)
    def trained(self, worker: int, report: SpotReport) -> None:
        self._ahead.add(worker)
        self._micro_batches += report.micro_batches
        self._seconds += report.seconds
        self.tokens += report.tokens

    @guarded(None)
    def go_on(self, idle: list[int]) -> None:
        """Whatever is due, with workers that are idle."""
        if not self._chain and not self._under_way:
            self._chain = self._due()
        while self._chain and not self._under_way:
            self._chain.link(self._chain, idle)

    def _due(self) -> Chain | None:
        """Replicas, if enough was trained; a look at the drafter in use where nothing is, as it would not pay."""
        if self._micro_batches >= STRETCH and self._ahead:
            chain = Chain(self._average, of=sorted(self._ahead), seconds=self._seconds)
            self._micro_batches, self._seconds, self._ahead = 0, 0.0, set()
            self._ask(chain, chain.of, "replica")
            return chain
        if not self._looked and self._looking < 0.0 and not self.gate.should_train():
            self._looked = True
            return Chain(self._judge)
        return None

    @guarded(False)
    def catch_up(self, idle: int) -> bool:
        """Before it trains, a worker takes the common start. Whether it must."""
        if idle not in self._behind:
            return False
        self._behind.discard(idle)
        self.crew.call(idle, "adopt", self._start)
        return True

    @property
    def _under_way(self) -> bool:
        """Whether answers are awaited, be it those of a chain that was given up."""
        return any(method in METHODS for index in range(self.crew.size) for method in self.crew.pending(index))

    @guarded(None)
    def answered(self, done: Done) -> None:
        """A call of the chain came back."""
        if self._chain and done.result is not None:
            self._chain.answers[done.worker] = done.result

    @guarded(None)
    def lost(self, worker: int) -> None:
        self._chain = None
        self._ahead.discard(worker)

    @guarded(None)
    def replaced(self, worker: int) -> None:
        """There is a new one in its place, with the drafter that the run began with."""
        if self._start is not None:
            self._behind.add(worker)
        if self.in_use:
            self.crew.call(worker, "take_drafter", *self.in_use)

    # -- the chain -----------------------------------------------------------------------------------------------------

    def _ask(self, chain: Chain, workers: Sequence[int], method: str, *arguments: object) -> None:
        chain.answers = {}
        for index in workers:
            (self.crew.call_idle if method in BREAKABLE else self.crew.call)(index, method, *arguments)

    def _average(self, chain: Chain, idle: list[int]) -> None:
        if not chain.answers:  # none is finite: they train again from the drafter in use
            self._chain = None
            return
        chain.candidate = average(list(chain.answers.values()))
        chain.given = self.crew.pool.put(chain.candidate)
        self._train_on_from(chain.given, chain.of)
        self._judge(chain, idle)

    def _judge(self, chain: Chain, idle: list[int]) -> None:
        chain.link, chain.asked = self._weigh, time.monotonic()
        self._ask(chain, idle[:1] if chain.lent else idle, "judge", chain.given, chain.lent)

    def _weigh(self, chain: Chain, idle: list[int]) -> None:
        """All that is known of the candidate by now: is it enough to go by?"""
        if not chain.candidate:
            self._looking += len(chain.answers) * (time.monotonic() - chain.asked)
        now = summed(chain.answers.values())
        chain.judged = summed([chain.judged, now])._replace(broken_off=False)
        others = [index for index in range(self.crew.size) if index not in chain.answers]
        if now.broken_off and chain.judged.entries < self._wanted:
            self._judge(chain, idle)
        elif chain.judged.entries or chain.lent or not others:
            self._decide(chain)
        else:
            chain.link = self._borrow
            self._ask(chain, others, "evidence")

    def _borrow(self, chain: Chain, idle: list[int]) -> None:
        chain.lent = [item for items in chain.answers.values() for item in items]
        (self._judge(chain, idle) if chain.lent else self._decide(chain))

    def _decide(self, chain: Chain) -> None:
        self._chain, judged = None, chain.judged
        if judged.entries:
            self._learn(judged, chain)
        if chain.candidate and judged.is_better:
            self._publish(chain.candidate, chain.given, judged.first / judged.entries)

    def _train_on_from(self, start: Handle, of: Sequence[int]) -> None:
        """All go on from there; who has trained it all alone stands there, or further on."""
        self._start, self._ahead = start, set()
        self._behind = set(range(self.crew.size)) - (set(of) if len(of) == 1 else set())

    def _learn(self, judged: Judgement, chain: Chain) -> None:
        now = judged.in_use / judged.entries
        if "accept_length" not in self.facts:
            self.gate.fresh(now)
        self.facts["accept_length"] = now
        if chain.candidate:
            self.facts["candidate"] = judged.candidate / judged.entries
            self.gate.gained(now, self.facts["candidate"], chain.seconds)

    def _publish(self, drafter: Replica, given: Handle, agreement: float) -> None:
        self.version += 1
        self.facts["version"] = float(self.version)
        self.in_use = drafter, agreement
        for index in range(self.crew.size):
            self.crew.call(index, "take_drafter", given, agreement)
        if self.saver:
            self.saver.save(self.version, drafter, agreement)

    # -- the checkpoint's part -----------------------------------------------------------------------------------------

    @guarded({})
    def state(self) -> dict[str, Any]:
        """Plain data; the drafter itself lies in `folder`."""
        return {"gate": self.gate.state(), "version": self.version}

    @guarded(None)
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the drafter that was published last."""
        self.gate.load_state(state["gate"])
        saved = load_latest(self.folder, self.options) if self.saver else None
        if saved:
            self.version, self.in_use = saved.number, (saved.replica, saved.layer.agreement)
            given = self.crew.pool.put(saved.replica)
            self.crew.everyone("take_drafter", given, saved.layer.agreement)
            self._train_on_from(given, of=())

    @guarded(None)
    def close(self) -> None:
        if self.saver:
            self.saver.wait()
