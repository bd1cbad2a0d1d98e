"""From replicas that idle workers trained to a drafter that all use: averaged, judged, swapped in.

A chain of calls that goes on as they come back: replicas of all; their average, judged against the drafter in use by
workers that are idle; then adopted by all, and published where it is better. Workers that decode give it a few
milliseconds. Where one is lost on the way, the next chain starts afresh.
"""

from __future__ import annotations

import logging

from tlt.cluster.crew import Crew, Done
from tlt.draft.average import Replica, average
from tlt.draft.spot import SpotReport, beats

log = logging.getLogger(__name__)

_STRETCH = 1.0  # seconds of training after which it is settled what they were good for
METHODS = ("replica", "judge", "settle")


class Publication:
    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.version = 0
        """of the drafter: one more per publication"""
        self.seconds = 0.0
        """of training, of all workers"""
        self.tokens = 0
        self.in_use: tuple[Replica, float | None] | None = None
        """what was published last, and its agreement"""
        self._since = 0.0  # seconds of training since the last chain began
        self._idle: list[int] = []
        self._replicas: list[Replica] = []
        self._common: Replica | None = None
        self._sums = [[0.0, 0], [0.0, 0]]
        self._left = 0  # calls that this link of the chain waits for

    def trained(self, report: SpotReport) -> None:
        self.seconds += report.seconds
        self.tokens += report.tokens
        self._since += report.seconds

    def is_due(self) -> bool:
        under_way = any(method in METHODS for index in range(self.crew.size) for method in self.crew.pending(index))
        return not under_way and self._since >= _STRETCH

    def begin(self, idle: list[int]) -> None:
        self._since, self._idle, self._replicas = 0.0, idle, []
        self._ask(range(self.crew.size), "replica")

    def _ask(self, workers: range | list[int], method: str, *arguments: object) -> None:
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
            if self._left == 0:
                self._judge()
        elif done.method == "judge":
            for sums, more in zip(self._sums, done.result or (), strict=False):
                sums[0] += more[0]
                sums[1] += more[1]
            if self._left == 0 and self._sums[0][1] == 0 and self._idle:  # all that was held back is with the others
                others, self._idle = [i for i in range(self.crew.size) if i not in self._idle], []
                self._ask(others, "judge", self.crew.pool.put(self._common))
            if self._left == 0:
                self._decide()
        elif self._left == 0:
            self._publish_everywhere(done)

    def give_up(self) -> None:
        """A worker was lost."""
        self._left, self._common = 0, None

    def _judge(self) -> None:
        try:
            self._common = average(self._replicas)
        except ValueError:
            log.warning("no drafter in training is finite; going on from the one in use")
            if self.in_use:
                self._ask(range(self.crew.size), "settle", self.in_use[0], False)
            return
        self._sums = [[0.0, 0], [0.0, 0]]
        self._ask(self._idle, "judge", self.crew.pool.put(self._common))

    def _decide(self) -> None:
        (mine, count), (theirs, other) = self._sums
        better = beats((mine, int(count)), (theirs, int(other)))
        given = self.crew.pool.put(self._common)
        if better:  # the first one measures its agreement for all
            self._ask((self._idle or [0])[:1], "settle", given, True)
        else:
            self._common = None
            self._ask(range(self.crew.size), "settle", given, False)

    def _publish_everywhere(self, done: Done) -> None:
        if self._common is None or done.result is None:
            self._common = None
            return  # the chain ends here, or the first one failed
        self.in_use, self._common = (self._common, done.result), None
        self.version += 1
        others = [index for index in range(self.crew.size) if index != done.worker]
        self._ask(others, "settle", self.crew.pool.put(self.in_use[0]), True, done.result)
