"""From replicas that idle workers trained to a drafter that all use: averaged, judged, swapped in.

A chain of calls that goes on as they come back: replicas of those who trained; their average, judged against the
drafter in use by workers that are idle; published where it is better. Those who decode are asked for next to nothing:
they take a published drafter between two rounds, and the common start of training once they are idle themselves.
Where one is lost on the way, the next chain starts afresh.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt.cluster.crew import Crew, Done
from tlt.cluster.local import starting_drafter
from tlt.cluster.pool import Handle
from tlt.cluster.worker import Judgement, summed
from tlt.config import Config
from tlt.draft.average import Replica, average
from tlt.draft.buffer import Harvest
from tlt.draft.saving import DrafterSaver, load_latest
from tlt.draft.spot import SpotReport, Sums, beats
from tlt.draft.worth import STRETCH, Worth
from tlt.models.families import decoder_options, read_config

log = logging.getLogger(__name__)

METHODS = ("replica", "judge", "held_back", "publish")


class Publication:
    """What is published is saved in the run's folder."""

    def __init__(self, crew: Crew, config: Config) -> None:
        self.crew = crew
        self.options = decoder_options(read_config(config.model.path))
        layer = starting_drafter(config, self.options)
        self.worth = Worth(config.drafter.unroll, trained=bool(layer and layer.published))
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
        self._micro_batches, self._seconds = 0, 0.0  # of training that was not judged yet
        self._start: Handle | None = None  # that all train on from, once it is no longer the run's own
        self._behind: set[int] = set()  # workers that have not taken it
        self._ahead: set[int] = set()  # and those that have trained since
        self._idle: list[int] = []
        self._replicas: dict[int, Replica] = {}
        self._common: Replica | None = None
        self._given: Handle | None = None  # the same, where workers can take it from
        self._judged: list[Judgement] = []
        self._lent: list[Harvest] = []  # by workers that decode, where the idle ones hold nothing back
        self._left = 0  # calls that this link of the chain waits for
        self._looked = False

    # -- what the coordinator asks and says ----------------------------------------------------------------------------

    def next_rollout(self) -> None:
        self.facts = {"version": float(self.version)}
        self._looked = False

    def trained(self, worker: int, report: SpotReport) -> None:
        self._ahead.add(worker)
        self._micro_batches += report.micro_batches
        self._seconds += report.seconds
        self.tokens += report.tokens

    def begin(self, idle: list[int]) -> bool:
        """Start the chain if it is due: enough was trained; or nothing was in this rollout, as it would not pay, and
        the drafter in use is to be looked at. Whether it was."""
        due = self._micro_batches >= STRETCH and bool(self._ahead)
        if self._under_way or not (due or (self.worth.resting and not self._looked)):
            return False
        self._idle, self._replicas, self._judged, self._lent, self._looked = idle, {}, [], [], True
        if due:
            self._ask(sorted(self._ahead), "replica")
        else:
            self._common = None
            self._left = len(idle)
            for index in idle:
                self.crew.call_idle(index, "judge", None, ())
        return True

    def catch_up(self, idle: int) -> bool:
        """Before it trains, a worker takes the common start. Whether it must."""
        if idle not in self._behind:
            return False
        self._behind.discard(idle)
        self.crew.call(idle, "adopt", self._start)
        return True

    @property
    def _under_way(self) -> bool:
        return any(method in METHODS for index in range(self.crew.size) for method in self.crew.pending(index))

    def lost(self, worker: int) -> None:
        self._left, self._common = 0, None
        self._ahead.discard(worker)

    def replaced(self, worker: int) -> None:
        """There is a new one in its place, with the drafter that the run began with."""
        if self._start is not None:
            self._behind.add(worker)
        if self.in_use:
            self.crew.call(worker, "take_drafter", *self.in_use)

    # -- the chain -----------------------------------------------------------------------------------------------------

    def _ask(self, workers: Sequence[int], method: str, *arguments: object) -> None:
        self._left = len(workers)
        for index in workers:
            self.crew.call(index, method, *arguments)

    def went_on(self, done: Done) -> None:
        """A call of the chain came back."""
        if self._left == 0:
            return  # of a chain that was given up
        self._left -= 1
        if done.result:
            if done.method == "replica":
                self._replicas[done.worker] = done.result
            elif done.method == "judge" and done.result.broken_off:
                self._left = 0  # it was a look alone: another rollout will have time for it
                return
            elif done.method == "judge":
                self._judged.append(done.result)
            elif done.method == "held_back":
                self._lent += done.result
        if self._left == 0:
            link = {
                "replica": self._average,
                "judge": self._decide,
                "held_back": self._judge_lent,
                "publish": self._publish,
            }
            link[done.method](done)

    def _average(self, done: Done) -> None:
        try:
            self._common = average(list(self._replicas.values()))
        except ValueError:
            log.warning("no drafter in training is finite; going on from the one in use")
            self._common, self._micro_batches, self._ahead = None, 0, set()
            if self.in_use:
                self._train_on_from(self.in_use[0], of=())
            return
        self._given = self.crew.pool.put(self._common)
        self._ask(self._idle, "judge", self._given)

    def _decide(self, done: Done) -> None:
        others = [index for index in range(self.crew.size) if index not in self._idle]
        if others and not self._lent and not any(judged.in_use[1] for judged in self._judged):
            self._ask(others, "held_back")
            return
        candidate, in_use = summed(self._judged)
        if in_use[1]:
            self._learn(candidate, in_use)
        if self._common is None:
            return
        self._micro_batches, self._seconds = 0, 0.0
        self._train_on_from(self._given, of=list(self._replicas))
        if beats(candidate, in_use):  # the first one says whether that works
            self._ask(self._idle[:1], "publish", self._given)
        else:
            self._common = None

    def _judge_lent(self, done: Done) -> None:
        if self._lent:
            self._ask(self._idle[:1], "judge", self._common and self._given, self._lent)
        else:
            self._idle = list(range(self.crew.size))
            self._decide(done)

    def _train_on_from(self, start: Handle, of: Sequence[int]) -> None:
        """All go on from there; who has trained it all alone stands there, or further on."""
        self._start, self._ahead = start, set()
        self._behind = set(range(self.crew.size)) - (set(of) if len(of) == 1 else set())

    def _learn(self, candidate: Sums, in_use: Sums) -> None:
        now = in_use[0] / in_use[1]
        if "accept_length" not in self.facts:
            self.worth.fresh(now)
        self.facts["accept_length"] = now
        if self._common and candidate[1]:
            self.facts["candidate"] = candidate[0] / candidate[1]
            self.worth.gained(now, self.facts["candidate"], self._seconds)

    def _publish(self, done: Done) -> None:
        common, self._common = self._common, None
        if common is None or done.result is None:
            return  # it failed
        self.version += 1
        self.facts["version"] = float(self.version)
        self.in_use = common, done.result
        for index in range(self.crew.size):
            if index != done.worker:
                self.crew.call(index, "take_drafter", self._given, done.result)
        if self.saver:
            self.saver.save(self.version, common, done.result)

    # -- the checkpoint's part -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data; the drafter itself lies in `folder`."""
        return {"worth": self.worth.state(), "version": self.version}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the drafter that was published last."""
        self.worth.load_state(state["worth"])
        saved = load_latest(self.folder, self.options) if self.saver else None
        if saved:
            self.version, self.in_use = saved.number, (saved.replica, saved.layer.published)
            given = self.crew.pool.put(saved.replica)
            self.crew.everyone("take_drafter", given, saved.layer.published)
            self._train_on_from(given, of=())

    def close(self) -> None:
        if self.saver:
            self.saver.wait()
