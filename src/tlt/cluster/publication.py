"""From replicas that idle workers trained to a drafter that all use: averaged, judged, swapped in.

A chain of calls that goes on as they come back: replicas of all; their average, judged against the drafter in use by
workers that are idle; then adopted by all, and published where it is better. Workers that decode give it a few
milliseconds. Where one is lost on the way, the next chain starts afresh.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt.cluster.crew import Crew, Done
from tlt.cluster.local import starting_drafter
from tlt.config import Config
from tlt.draft.average import Replica, average
from tlt.draft.saving import DrafterSaver, load_latest
from tlt.draft.spot import SpotReport, beats
from tlt.draft.worth import STRETCH, Worth
from tlt.models.families import decoder_options, read_config

log = logging.getLogger(__name__)

METHODS = ("replica", "judge", "settle")

Sums = tuple[float, int]
"""of a judgement: accept lengths, and of how many entries"""


class Publication:
    """What is published is saved in the run's folder."""

    def __init__(self, crew: Crew, config: Config) -> None:
        self.crew, self.worth = crew, Worth()
        self.options = decoder_options(read_config(config.model.path))
        layer = starting_drafter(config, self.options)
        self.folder = Path(config.run.folder).resolve() / "drafter"
        self.saver = DrafterSaver(self.folder, layer.options) if layer else None
        self.goes_live = True
        """what is better; without it, training is done for nothing, which shows what it costs"""
        self.version = 0
        """of the drafter: one more per publication"""
        self.in_use: tuple[Replica, float | None] | None = None
        """what was published last, and its agreement"""
        self.tokens = 0
        """entries trained on, in the whole run"""
        self.facts: dict[str, float] = {}
        """of the rollout under way: drafter version, accept lengths judged"""
        self._micro_batches, self._seconds = 0, 0.0  # of training that was not judged yet
        self._idle: list[int] = []
        self._replicas: list[Replica] = []
        self._common: Replica | None = None
        self._judged: list[tuple[Sums, Sums]] = []  # the candidate, and the one in use
        self._left = 0  # calls that this link of the chain waits for
        self._looked = False

    # -- what the coordinator asks and says ----------------------------------------------------------------------------

    def next_rollout(self) -> None:
        self.facts = {"version": float(self.version)}
        self._looked = False

    def trained(self, report: SpotReport) -> None:
        self._micro_batches += report.micro_batches
        self._seconds += report.seconds
        self.tokens += report.tokens

    def begin(self, idle: list[int]) -> bool:
        """Start the chain if it is due: enough was trained; or nothing was in this rollout, as it would not pay, and
        the drafter in use is to be looked at. Whether it was."""
        due = self._micro_batches >= STRETCH
        if self._under_way or not (due or (self.worth.resting and not self._looked)):
            return False
        self._idle, self._replicas, self._judged, self._looked = idle, [], [], True
        if due:
            self._ask(range(self.crew.size), "replica")
        else:
            self._common = None
            self._ask(idle, "judge", None)
        return True

    @property
    def _under_way(self) -> bool:
        return any(method in METHODS for index in range(self.crew.size) for method in self.crew.pending(index))

    def give_up(self) -> None:
        """A worker was lost."""
        self._left, self._common = 0, None

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
        if done.method == "replica":
            self._replicas += [done.result] if done.result else []
        elif done.method == "judge":
            self._judged += [done.result] if done.result else []
        if self._left == 0:
            {"replica": self._judge, "judge": self._decide, "settle": self._publish}[done.method](done)

    def _judge(self, done: Done) -> None:
        try:
            self._common = average(self._replicas)
        except ValueError:
            log.warning("no drafter in training is finite; going on from the one in use")
            self._common, self._micro_batches = None, 0
            if self.in_use:
                self._ask(range(self.crew.size), "settle", self.in_use[0], False)
            return
        self._ask(self._idle, "judge", self.crew.pool.put(self._common))

    def _decide(self, done: Done) -> None:
        others = [index for index in range(self.crew.size) if index not in self._idle]
        if others and not any(in_use[1] for _, in_use in self._judged):  # all that was held back is with them
            self._idle = [*self._idle, *others]
            self._ask(others, "judge", self._common and self.crew.pool.put(self._common))
            return
        candidate, in_use = (_sum([sums[side] for sums in self._judged]) for side in (0, 1))
        if in_use[1]:
            self._learn(candidate, in_use)
        if self._common is None:
            return
        self._micro_batches, self._seconds = 0, 0.0
        given = self.crew.pool.put(self._common)
        if self.goes_live and beats(candidate, in_use):  # the first one says whether that works
            self._ask(self._idle[:1], "settle", given, True)
        else:
            self._common = None
            self._ask(range(self.crew.size), "settle", given, False)

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
            return  # the chain ends here, or the first one failed
        self.version += 1
        self.facts["version"] = float(self.version)
        self.in_use = common, done.result
        if self.saver:
            self.saver.save(self.version, common, done.result)
        others = [index for index in range(self.crew.size) if index != done.worker]
        self._ask(others, "settle", self.crew.pool.put(common), True, done.result)

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
            self.crew.everyone("settle", self.crew.pool.put(saved.replica), True, saved.layer.published)

    def close(self) -> None:
        if self.saver:
            self.saver.wait()


def _sum(sums: Sequence[Sums]) -> Sums:
    return sum(total for total, _ in sums), sum(count for _, count in sums)
