"""Serial training, to compare spot training with: the drafter is trained between two steps, on as many tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tlt.cluster.coordinator import Coordinator
from tlt.cluster.publication import METHODS, Publication
from tlt.cluster.remote import ClusterRollout
from tlt.loop import Rollout
from tlt.trace import IDLE, SPOT

_PATIENCE = 300.0  # seconds for a judgement to come back


def serially(tokens: Sequence[int]) -> Callable[[Rollout], Rollout]:
    """The `wrap` of `tlt.run.train`. After step s all workers together train on `tokens[s]` entries, and the candidate
    goes live if it is better. No worker trains while others decode."""

    def wrap(rollout: Rollout) -> Rollout:
        assert isinstance(rollout, ClusterRollout), "trained by the workers of a cluster"
        return SerialRollout(rollout.coordinator, tokens)

    return wrap


class SerialRollout(ClusterRollout):
    def __init__(self, coordinator: Coordinator, tokens: Sequence[int]) -> None:
        super().__init__(coordinator)
        self.tokens = tokens
        coordinator.trains_when_idle = False
        coordinator.drafter.tell(_judges_after_every_step)

    def sync(self, policy: Any, version: int) -> None:
        for tracer in self.coordinator.tracers:
            tracer.enter(SPOT)
        self.coordinator.drafter.tell(lambda drafter: self._train(drafter, self.tokens[version - 1]))
        for tracer in self.coordinator.tracers:
            tracer.enter(IDLE)
        super().sync(policy, version)

    def _train(self, drafter: Publication, tokens: int) -> None:
        """Train on so many tokens, as far as there is enough harvest; then judge the candidate."""
        workers = range(self.crew.size)
        self.crew.everyone("rollout_ended")
        for worker in workers:
            drafter.do(drafter.life.about_to_train(worker))
        wanted = drafter.life.tokens + tokens
        while drafter.life.tokens < wanted:
            reports = self.crew.everyone("spot", 0.0)
            for worker, report in reports.items():
                if report:
                    drafter.life.trained(worker, report)
            if not any(reports.values()):
                break
        while actions := drafter.life.idle(workers):
            drafter.do(actions)
            self.crew.call_back(METHODS, _PATIENCE)
            self.coordinator.hear()


def _judges_after_every_step(drafter: Publication) -> None:
    """Judge after every step, however little was trained, and never look at a drafter at rest."""
    gate = drafter.life.gate
    at_rest = {"looks": 0.0, "settled_looks": 0.0, "surprise": -math.inf}
    gate.thresholds = replace(gate.thresholds, stretch=1, **at_rest)
