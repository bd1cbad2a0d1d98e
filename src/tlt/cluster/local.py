"""One worker, in this process: its engine behind the loop's `Rollout` protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from tlt.cluster.ahead import in_order
from tlt.cluster.budget import Budget
from tlt.draft.ahead import Ahead
from tlt.draft.guard import Guard
from tlt.engine.protocol import RolloutEngine
from tlt.loop import Trainable
from tlt.rl.parity import take_weights
from tlt.rl.policy import Policy
from tlt.trace import COMPARE, IDLE, ROLLOUT, SPOT, UPDATE, Span, Tracer
from tlt.types import Request, Response, RolloutStats, WorkerNow


class LocalRollout:
    def __init__(self, engine: RolloutEngine, budget: Guard[Budget] | None = None, look_ahead: int = 0) -> None:
        """`look_ahead`: number of coming steps whose requests are decoded beside a long tail, where a round may have
        more rows at little cost."""
        self.engine, self.look_ahead = engine, look_ahead
        self.budget = budget or Guard[Budget](None)
        self.plain = engine.plain_beside()
        self.tracer = engine.tracer or Tracer()
        self.tracer.enter(IDLE)
        self._live: tuple[int, ...] = ()

    def sync(self, policy: Trainable, version: int) -> None:
        assert isinstance(policy, Policy), "the one in this process"
        take_weights(self.engine.target, policy, version)
        self.budget.tell(lambda budget: budget.trainer.target_moved())
        self.tracer.enter(IDLE)

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None],
        coming: Iterable[list[Request]] = (),
    ) -> tuple[list[Response], RolloutStats]:
        responses = []
        self.tracer.enter(ROLLOUT)
        self.engine.start(requests)
        if self.engine.tuner.free_rows(1) > 1:
            steps = islice(coming, self.look_ahead)
            left = [r for step in steps for r in step if not self.engine.store.has_ended(r)]
            self.engine.look_ahead(in_order(left, self.engine.store))
        while self.engine.busy:
            finished = self.engine.round()
            self._live = tuple(len(row.tokens) for row in self.engine.rows if not row.ahead)
            for response in finished:
                responses.append(response)
                on_response(response)
        self.engine.look_ahead(())
        if self.budget.inside:
            self.tracer.enter(SPOT)
            self.budget.tell(lambda budget: budget.spend(self.engine))
        self.engine.store.forget(request.seed for request in requests)
        self.tracer.enter(IDLE)
        return responses, self.engine.stats

    def plainly(self, requests: Sequence[Request], on_response: Callable[[Response], None]) -> list[Response]:
        self.tracer.enter(COMPARE)
        self.engine.release()
        responses = []
        for response in self.plain.generate(requests):
            responses.append(response)
            on_response(response)
        self.plain.release()
        self.tracer.enter(IDLE)
        return responses

    def remember(self, drafts: Iterable[Ahead]) -> None:
        self.engine.store.put(drafts)

    def state(self) -> dict[str, Any]:
        drafter: dict[str, Any] = self.budget(lambda budget: budget.life.state(), {})
        return {"tuner": self.engine.tuner.state(), "drafter": drafter}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.engine.tuner.load_state(state["tuner"])
        self.budget.tell(lambda budget: budget.load_state(state.get("drafter", {}), self.engine))

    def now(self) -> list[WorkerNow]:
        return [WorkerNow(self.tracer.state, self._live)]

    def release(self) -> None:
        self.tracer.enter(UPDATE)
        self.engine.release()

    def trace(self) -> list[list[Span]]:
        return [self.tracer.drain()]

    def peak_memory(self) -> dict[str, dict[str, float]]:
        return {}

    def close(self) -> None:
        """There is nothing to end: nothing of it outlives the process."""
