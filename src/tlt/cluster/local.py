"""One worker, in this process: its engine behind the loop's `Rollout` protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tlt.cluster.budget import Budget
from tlt.engine.engine import Engine
from tlt.loop import Trainable
from tlt.rl.agreement import take_weights
from tlt.rl.policy import Policy
from tlt.trace import IDLE, ROLLOUT, SPOT, UPDATE, Span, Tracer
from tlt.types import Request, Response, RolloutStats


class LocalRollout:
    def __init__(self, engine: Engine, budget: Budget | None = None) -> None:
        self.engine, self.budget = engine, budget
        self.tracer = engine.tracer or Tracer()
        self.tracer.enter(IDLE)

    def sync(self, policy: Trainable, version: int) -> None:
        assert isinstance(policy, Policy), "the one in this process"
        take_weights(self.engine.target, policy, version)
        if self.budget:
            self.budget.target_moved()
        self.tracer.enter(IDLE)

    def generate(
        self, requests: Sequence[Request], on_response: Callable[[Response], None]
    ) -> tuple[list[Response], RolloutStats]:
        responses = []
        self.tracer.enter(ROLLOUT)
        for response in self.engine.generate(requests):
            responses.append(response)
            on_response(response)
        if self.budget:
            self.tracer.enter(SPOT)
            self.budget.spend(self.engine)
        self.tracer.enter(IDLE)
        return responses, self.engine.stats

    def state(self) -> dict[str, Any]:
        return {"tuner": self.engine.tuner.state(), "drafter": self.budget.state() if self.budget else {}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.engine.tuner.load_state(state["tuner"])
        if self.budget and state.get("drafter"):
            self.budget.load_state(state["drafter"], self.engine)

    def release(self) -> None:
        self.tracer.enter(UPDATE)
        self.engine.release()

    def trace(self) -> list[list[Span]]:
        return [self.tracer.drain()]

    def close(self) -> None:
        """Nothing of it outlives the process."""
