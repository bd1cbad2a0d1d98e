"""A worker: a target with its engine, and a drafter with its trainer. `run_worker.py` adds the policy.

It is driven by short calls. A call takes a bounded time and returns its results. The worker has no thread and no queue
of its own. So its caller knows when the worker is idle, and notices a lost worker by a failed call. Only `interrupt`
and `updated` are called while another call runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tlt.build import open_engine, starting_drafter
from tlt.config import Config
from tlt.draft.ahead import Ahead
from tlt.engine.protocol import RolloutEngine, Target
from tlt.metrics import peak_memory
from tlt.spelling import Detokenizer
from tlt.spot.saving import TrainerState
from tlt.spot.schedule import Evaluation, SpotReport
from tlt.spot.spot import SpotTrainer
from tlt.spot.spot_worker import SpotWorker
from tlt.trace import Span, Tracer
from tlt.types import Request, Response, RolloutStats, Row

_FILE = Path("/proc/thread-self/schedstat")  # Linux: nanoseconds on a core, nanoseconds of waiting for one


class DecodeWork(NamedTuple):
    """Input of `Worker.decode`: changes to the rows that the worker already has, and options."""

    rollout: int
    """Number of the rollout. If it is new, the worker drops its rows of the previous rollout."""
    requests: Sequence[Request] = ()
    resumed: Sequence[Row] = ()
    drafts: Sequence[Ahead] = ()
    """look-ahead drafts for the new requests and those in `coming`, and the last responses to their prompts"""
    coming: Sequence[Request] | None = ()
    """requests of coming steps that the worker decodes in free slots; None: it continues with those of the last call"""
    plain: bool = False
    """whether to use plain decoding, regardless of the recipe"""


class AheadWork(NamedTuple):
    """Input of `Worker.look_ahead`: requests of coming steps for an idle worker."""

    rollout: int
    requests: Sequence[Request]
    drafts: Sequence[Ahead]
    """look-ahead drafts so far for these requests and their siblings (requests with the same prompt), and the last
    responses to their prompts"""


class Slice(NamedTuple):
    """Result of `Worker.decode`, which decodes for a fraction of a second."""

    responses: list[Response]
    stats: RolloutStats
    """counters of this worker for the whole rollout so far"""
    live: dict[int, int]
    """number of tokens so far of each active row, by seed"""
    news: dict[int, list[int]]
    """tokens that active and waiting rows gained since the previous slice, by seed"""
    drafts: Sequence[Ahead] = ()
    """look-ahead drafts that were decoded in free slots; they are returned when all rows have finished"""
    seconds: float = 0.0
    waited: float = 0.0
    """seconds in which the decoding thread waited for a free core"""


def _waited() -> float:
    """Return the seconds so far in which this thread was ready to run and waited for a core; 0 if they are unknown."""
    with suppress(OSError):
        return int(_FILE.read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0


class Worker:
    """Worker that decodes, trains the drafter, and looks ahead. Its caller loads the target's weights."""

    def __init__(self, config: Config, engine: RolloutEngine, spot: SpotWorker | None = None) -> None:
        self.config, self.engine, self.target, self.store = config, engine, engine.target, engine.store
        self.spot = spot or SpotWorker(None, engine.draft_with)
        self.tracer = engine.tracer or Tracer()
        self.plain = engine.plain_engine()
        self.is_wanted: Callable[[], bool] = lambda: False
        """function that returns whether idle work must end; it is set if the worker is in the caller's process"""
        self._rollout = -1
        self._coming: Sequence[Request] = ()  # look-ahead requests for free slots of the current rollout
        self._reported: dict[int, int] = {}  # number of tokens reported so far, by seed
        self._ends = 0.0  # idle calls with this number or a lower one must end

    # -- rollout -------------------------------------------------------------------------------------------------------

    def decode(self, work: DecodeWork, seconds: float) -> Slice:
        """Decode at least one round, until the seconds are over or all rows have finished. Raises ValueError for a
        request that cannot be decoded."""
        engine, other = (self.plain, self.engine) if work.plain else (self.engine, self.plain)
        if work.rollout != self._rollout:
            other.release()
        self._enter_rollout(work.rollout, work.drafts, engine)
        began, waited = time.perf_counter(), _waited()
        if work.coming is not None:
            self._coming = work.coming if engine.tuner.free_rows(1) > 1 else ()
            engine.look_ahead(self._coming)
        self._reported |= {row.request.seed: len(row.tokens) for row in work.resumed}
        engine.submit(work.requests, work.resumed)
        responses: list[Response] = []
        while engine.busy:
            responses += engine.round()
            if time.perf_counter() - began >= seconds:
                break
        live = {row.request.seed: len(row.tokens) for row in engine.rows}
        drafts = [] if engine.busy else self._drafts_of(self._coming)
        took, waited = time.perf_counter() - began, _waited() - waited
        return Slice(responses, engine.stats, live, self._news(engine), drafts, took, waited)

    def _news(self, engine: RolloutEngine) -> dict[int, list[int]]:
        rows = {row.request.seed: row for row in (*engine.rows, *engine.waiting)}
        news = {seed: row.tokens[self._reported.get(seed, 0) :] for seed, row in rows.items()}
        self._reported = {seed: len(row.tokens) for seed, row in rows.items()}
        return news

    def look_ahead(self, work: AheadWork, seconds: float, number: float = math.inf) -> list[Ahead]:
        """Decode requests of coming steps until the seconds are over, all requests have ended, or `interrupt` is
        called. Unfinished requests continue in the next call. Return the drafts that the current target version decoded
        for these requests. `number`: see `train_drafter`."""
        began = time.perf_counter()
        self._enter_rollout(work.rollout, work.drafts, self.engine)
        self.engine.look_ahead(work.requests)
        with self.tracer.span("ahead"):
            while self.engine.looks_ahead and not self._must_end(number):
                self.engine.round()
                if time.perf_counter() - began >= seconds:
                    break
        return self._drafts_of(work.requests)

    def _drafts_of(self, requests: Sequence[Request]) -> list[Ahead]:
        """Return the look-ahead drafts that the current target version decoded for these requests."""
        self.engine.keep_ahead()
        known = [self.store.get(request) for request in requests]
        return [ahead for ahead in known if ahead and ahead.version == self.target.version]

    def _enter_rollout(self, number: int, drafts: Sequence[Ahead], engine: RolloutEngine) -> None:
        """Store these drafts. If the rollout is new, drop the rows and drafts of the previous one."""
        if number != self._rollout:
            engine.start(())
            self.store.clear()  # the driver has all drafts, and sends those that are needed
            self._rollout = number
        self.store.put(drafts)

    # -- the drafter: faults here reduce speed only --------------------------------------------------------------------

    def interrupt(self, number: float) -> None:
        """End calls of idle work whose number is at most `number`, within a micro-batch or a round. If such a call has
        not begun yet, it ends at once when it begins. This method is called from another thread."""
        self._ends = number

    def _must_end(self, number: float) -> bool:
        """Return whether the idle call with this number must end."""
        return self._ends >= number or self.is_wanted()

    def train_drafter(self, start: TrainerState | None, seconds: float, number: float = math.inf) -> SpotReport | None:
        """Train the drafter (`SpotWorker.train_drafter`). `number` identifies this call for `interrupt`. It is above 0
        and above the numbers of earlier calls of idle work."""
        with self.tracer.span("spot"):
            return self.spot.train_drafter(start, seconds, lambda: self._must_end(number))

    def evaluate_drafter(self, start: TrainerState | None, number: float = math.inf) -> Evaluation | None:
        with self.tracer.span("judge"):
            return self.spot.evaluate_drafter(start, lambda: self._must_end(number))

    def drafter_state(self) -> TrainerState | None:
        return self.spot.drafter_state()

    def take_drafter(self, state: TrainerState, acceptance: float | None) -> None:
        self.spot.take_drafter(state, acceptance)

    def forget_older_data(self) -> None:
        self.spot.forget_older_data()

    def rollout_ended(self) -> None:
        self.spot.rollout_ended()

    # -- between rollouts ---------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Free the engines' memory for the update that follows."""
        self.engine.release()
        self.plain.release()

    def trace(self) -> list[Span]:
        """Return the recorded spans of time since the last call of this method."""
        return self.tracer.drain()

    def peak_memory(self) -> dict[str, float]:
        return peak_memory()

    def tuner_state(self) -> dict[str, Any]:
        return self.engine.tuner.state()

    def load_tuner_state(self, state: Mapping[str, Any]) -> None:
        self.engine.tuner.load_state(state)


def decoding_parts(
    config: Config, target: Target, index: int = 0, detokenize: Detokenizer | None = None
) -> tuple[RolloutEngine, SpotWorker]:
    """Return an engine that decodes with `target`, and the training of its drafter. The target has its weights.
    `index`: index of the worker, which is added to the seed of the training.
    `detokenize`: detokenizer of the target (default: that of the recipe's model)."""
    layer = starting_drafter(config, target.options)
    training, seed = config.speculation.training, config.run.seed + index
    trainer = SpotTrainer(layer, target.teacher, training, seed) if layer else None
    spot = SpotWorker(trainer, lambda layer: engine.draft_with(layer))
    engine = open_engine(config, target, layer, spot.harvest if layer else None, Tracer(), detokenize)
    return engine, spot
