"""One worker in this process: its engine behind the loop's `Rollout` protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from tlt.cluster.ahead import in_order
from tlt.cluster.crew import Done
from tlt.cluster.drafter_training import METHODS, DrafterTraining
from tlt.config import Config
from tlt.draft.ahead import Ahead
from tlt.draft.eagle import EagleLayer
from tlt.draft.strategy import LEARNED
from tlt.engine.protocol import RolloutEngine
from tlt.environments.episodes import SingleTurn, Turns
from tlt.loop import Trainable
from tlt.models.families import DecoderOptions
from tlt.rl.early import EarlyGroups
from tlt.rl.parity import take_weights
from tlt.rl.policy import Policy
from tlt.spot.spot_worker import SpotWorker
from tlt.trace import COMPARE, IDLE, ROLLOUT, SPOT, UPDATE, Span, Tracer
from tlt.types import Request, Response, RolloutStats, Row, WorkerNow

_SLICE = 0.5  # seconds of one training call, or of one wait for replies


class OneWorker:
    """Calls to the only worker, in this process. Each call runs immediately. A call of idle work ends when `stop`
    returns True."""

    def __init__(self, worker: SpotWorker) -> None:
        self.worker, self.present = worker, [0]
        self.stop: Callable[[], bool] = lambda: False
        self._done: list[Done] = []

    def free(self) -> list[int]:
        return self.present

    def call(self, index: int, method: str, *arguments: Any) -> None:
        result = getattr(self.worker, method)(*arguments)
        if method in METHODS:
            self._done.append(Done(index, method, result))

    def call_idle(self, index: int, method: str, *arguments: Any) -> None:
        self.call(index, method, *arguments, self.stop)

    def done(self) -> list[Done]:
        done, self._done = self._done, []
        return done


class OwnTraining(DrafterTraining):
    """Drafter training by the only worker, in this process."""

    def __init__(self, worker: SpotWorker, config: Config, target: DecoderOptions, layer: EagleLayer | None) -> None:
        self.worker, self._calls = worker, OneWorker(worker)
        super().__init__(self._calls, lambda value: value, config, target, layer)

    def train_until(self, is_over: Callable[[], bool]) -> None:
        """Train, evaluate and publish drafters until `is_over` returns True or the schedule has nothing due."""
        self._calls.stop = is_over
        self.train_for(lambda: 0.0 if is_over() else _SLICE, _SLICE, self.next_call, self.handle_result)
        while done := self._calls.done():  # a candidate may be waiting for its publication
            for one in done:
                self.handle_result(one)


class LocalRollout:
    """Rollout by an engine in this process.

    In the long tail of a rollout, few rows are left. If more rows then cost little time, the engine also decodes
    requests of the next `look_ahead` steps.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        training: OwnTraining | None = None,
        look_ahead: int = 0,
        turns: Turns | None = None,
    ) -> None:
        self.engine, self.training, self.look_ahead = engine, training, look_ahead
        self.turns = turns or SingleTurn()
        self.plain = engine.plain_engine()
        self.tracer = engine.tracer or Tracer()
        self.tracer.enter(IDLE)
        self._live: tuple[int, ...] = ()

    def sync(self, policy: Trainable, version: int) -> None:
        assert isinstance(policy, Policy), "the policy must be in this process"
        take_weights(self.engine.target, policy, version)
        if self.training:
            self.training.worker.target_moved()
        self.tracer.enter(IDLE)

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None],
        coming: Iterable[list[Request]] = (),
        early: EarlyGroups | None = None,
    ) -> tuple[list[Response], RolloutStats]:
        """Decode the requests. `early` is not used, because the only worker is never idle during a rollout."""
        self.tracer.enter(ROLLOUT)
        self.engine.start(())
        rows = self.turns.begin(requests)
        if self.engine.tuner.free_rows(1) > 1 and not self.turns.opens:
            steps = islice(coming, self.look_ahead)
            left = [r for step in steps for r in step if not self.engine.store.has_ended(r)]
            self.engine.look_ahead(in_order(left, self.engine.store))
        responses = self._decode(self.engine, rows, on_response)
        self.engine.look_ahead(())
        if self.training and self.training.is_on:
            self._train_drafter(self.training)
        self.engine.store.forget(request.seed for request in requests)
        self.tracer.enter(IDLE)
        return responses, self.engine.stats

    def _decode(
        self, engine: RolloutEngine, rows: Sequence[Row], on_response: Callable[[Response], None]
    ) -> list[Response]:
        """Decode these rows and all later turns of their episodes. While all rows wait for replies of environments,
        decode look-ahead requests."""
        responses = []
        engine.submit((), rows)
        while engine.busy or self.turns.awaits:
            decodes = engine.busy or engine.looks_ahead
            ended = engine.round() if decodes else []
            self._live = tuple(len(row.tokens) for row in engine.rows if not row.ahead)
            finished, rows = self.turns.take(ended, 0.0 if decodes else _SLICE)
            engine.submit((), rows)
            for response in finished:
                responses.append(response)
                on_response(response)
        return responses

    def _train_drafter(self, training: OwnTraining) -> None:
        """Train the drafter for `speculation.training.extra` times the rollout's time. Add results to the stats."""
        self.tracer.enter(SPOT)
        began, stats = time.perf_counter(), self.engine.stats
        rollout_seconds = sum(stats.seconds.values())
        training.rollout_ended(rollout_seconds, stats.acceptance_rate.get(LEARNED))
        until = began + training.extra * rollout_seconds
        if training.extra:
            training.train_until(lambda: time.perf_counter() >= until)
        stats.drafter_tokens, stats.spot = training.take_tokens(), training.report()
        stats.seconds["spot"] = time.perf_counter() - began

    def generate_plain(self, requests: Sequence[Request], on_response: Callable[[Response], None]) -> list[Response]:
        self.tracer.enter(COMPARE)
        self.engine.release()
        self.plain.start(())
        responses = self._decode(self.plain, self.turns.begin(requests), on_response)
        self.plain.release()
        self.tracer.enter(IDLE)
        return responses

    def remember(self, drafts: Iterable[Ahead]) -> None:
        self.engine.store.put(drafts)

    def state(self) -> dict[str, Any]:
        return {"tuner": self.engine.tuner.state(), "drafter": self.training.state() if self.training else {}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.engine.tuner.load_state(state["tuner"])
        if self.training:
            self.training.load_state(state.get("drafter", {}))

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
        if self.training:
            self.training.close()
        self.turns.close()
