"""The drafter's life with many workers: turns the actions of `draft/lifecycle.py` into calls of the crew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tlt.build import starting_drafter
from tlt.cluster.balance import Beside
from tlt.cluster.crew import Crew
from tlt.cluster.pool import Handle
from tlt.cluster.worker import Slice
from tlt.config import Config
from tlt.draft.average import Replica, average
from tlt.draft.gate import TrainingGate
from tlt.draft.horizon import Horizon
from tlt.draft.lifecycle import Action, Adopt, Collect, Combine, Forget, Judge, Lifecycle, Publish, Take
from tlt.draft.saving import DrafterSaver, load_latest, newest_number
from tlt.metrics import against_plain
from tlt.models.families import decoder_options, read_config
from tlt.trace import Tracer
from tlt.types import Response

METHODS = ("replica", "judge")
"""calls of workers that the drafter's life waits for"""


def mark_decisions(gate: TrainingGate, tracer: Tracer) -> None:
    """Mark the gate's new decisions in the trace, with their numbers."""
    for decision in gate.taken_note():
        tracer.mark("drafter trains" if decision.trains else "drafter rests", **decision.numbers())


class Shared(NamedTuple):
    """A drafter, and the handle by which workers take it."""

    replica: Replica
    given: Handle


class Publication:
    """Carries out the drafter's life; saves published drafters in the run's folder. Use it through a `Guard` alone."""

    def __init__(self, crew: Crew, config: Config) -> None:
        self.crew, self.steps = crew, config.train.steps
        self.options = decoder_options(read_config(config.model.path))
        training, layer = config.speculation.training, starting_drafter(config, self.options)
        gate = TrainingGate(training.unroll, trained=bool(layer and layer.trained))
        self.life = Lifecycle(gate, crew.size, training.micro_batch_tokens)
        self.folder = Path(config.run.folder).resolve() / "drafter"
        self.saver = DrafterSaver(self.folder, layer.options) if layer else None

    @property
    def trains(self) -> bool:
        """Whether a drafter is trained at all."""
        return self.saver is not None

    def go_on(self, idle: Sequence[int]) -> None:
        """Do whatever is due, with the idle workers."""
        while actions := self.life.idle(idle):
            self.do(actions)

    def rollout_ends(
        self,
        version: int,
        seconds: float,
        responses: Iterable[Response],
        beside: Beside,
        slices: Sequence[Slice],
        tracer: Tracer,
    ) -> None:
        """A rollout by the target of this version has ended; `slices` are the last ones of the workers that decoded.
        Marks the decisions on training in the trace; where no drafter is trained, there is nothing to decide."""
        if not self.trains:
            return
        workers, steps = len(self.crew.present), max(0, self.steps - version - 1)
        idle = beside.idle_seconds(seconds * workers)
        entries = sum(len(response.token_ids) for response in responses)
        speed = against_plain(one.stats.against_plain for one in slices).get("times", 0.0)
        horizon = Horizon(steps, seconds, idle, beside.second_costs, workers, entries, speed, version)
        self.life.rollout_ends(horizon, [cost for one in slices for cost in one.costs])
        mark_decisions(self.life.gate, tracer)

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Collect(workers):
                self._ask(workers, "replica")
            case Combine(replicas, start):
                common = average(replicas, start.replica if start else None)
                self.life.combined(Shared(common, self.crew.pool.put(common)))
            case Judge(workers, candidate):
                for worker in workers:
                    self.crew.call_idle(worker, "judge", candidate.given if candidate else None)
            case Publish(version, candidate, agreement):
                self._call(range(self.crew.size), "take_drafter", candidate.given, agreement)
                if self.saver:
                    self.saver.save(version, candidate.replica, agreement)
            case Take(workers, candidate, agreement):
                self._call(workers, "take_drafter", candidate.given, agreement)
            case Adopt(worker, start):
                self._call([worker], "adopt", start.given)
            case Forget(workers):
                self._call(workers, "forget")

    def _ask(self, workers: Iterable[int], method: str) -> None:
        """Call the method of these workers. One that is left out is taken to answer None."""
        for worker in workers:
            if worker in self.crew.present:
                self.crew.call(worker, method)
            else:
                self.life.answered(worker, None)

    def _call(self, workers: Iterable[int], method: str, *arguments: object) -> None:
        for worker in workers:
            self.crew.call(worker, method, *arguments)

    # -- the checkpoint's part -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data; of a run that trains no drafter there is none, as one that goes on from it may train one."""
        return self.life.state() if self.trains else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state, and go on with the drafter that was published last. Where none can be read, later ones
        are numbered after those in the folder, as the saver keeps those with the highest numbers."""
        self.life.version = newest_number(self.folder)
        if saved := load_latest(self.folder, self.options) if self.saver else None:
            shared = Shared(saved.replica, self.crew.pool.put(saved.replica))
            self.do(self.life.restored(saved.number, shared, saved.layer.agreement))
        self.life.load_state(state)

    def close(self) -> None:
        if self.saver:
            self.saver.wait()
