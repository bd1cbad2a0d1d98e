"""What spot training is compared with: training between two steps, as others do it, given as many drafter tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tlt.cluster.coordinator import Coordinator
from tlt.cluster.remote import ClusterRollout
from tlt.draft.average import average
from tlt.draft.spot import summed
from tlt.loop import Rollout
from tlt.trace import IDLE, SPOT


def serially(tokens: Sequence[int]) -> Callable[[Rollout], Rollout]:
    """For `tlt.run.train`: after step s all workers train on `tokens[s]` entries in sum, and what is better goes live;
    while they decode, none trains."""

    def wrap(rollout: Rollout) -> Rollout:
        assert isinstance(rollout, ClusterRollout), "trained by the workers of a cluster"
        return SerialRollout(rollout.coordinator, tokens)

    return wrap


class SerialRollout(ClusterRollout):
    def __init__(self, coordinator: Coordinator, tokens: Sequence[int]) -> None:
        super().__init__(coordinator)
        self.tokens = tokens
        coordinator.trains_when_idle = False

    def sync(self, policy: Any, version: int) -> None:
        super().sync(policy, version)
        for tracer in self.coordinator.tracers:
            tracer.enter(SPOT)
        if self._train(self.tokens[version - 1]):
            self._publish()
        for tracer in self.coordinator.tracers:
            tracer.enter(IDLE)

    def _train(self, tokens: int) -> int:
        """Returns how many were trained on: none where there is too little harvest."""
        done = 0
        while done < tokens:
            reports = [report for report in self.crew.everyone("spot", 0.0) if report]
            if not reports:
                break
            done += sum(report.tokens for report in reports)
        return done

    def _publish(self) -> None:
        """The average of all replicas, if it is better than the drafter in use."""
        replicas = [replica for replica in self.crew.everyone("replica") if replica]
        if not replicas:
            return
        common = self.crew.pool.put(average(replicas))
        judged = summed(judgement for judgement in self.crew.everyone("judge", common) if judgement)
        if judged.is_better:
            self.crew.everyone("take_drafter", common, judged.first / judged.entries)
        self.crew.everyone("adopt", common)
