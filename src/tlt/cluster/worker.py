"""A worker: a target with its engine, a replica of the policy, a drafter and its trainer, driven by short calls.

A call takes a bounded time and returns its results. The worker has no thread and no queue of its own. So its caller
knows when the worker is idle, and notices a lost worker by a failed call. Only `interrupt` and `updated` are called
while another call runs.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt.build import open_engine, open_target, starting_drafter
from tlt.config import Config
from tlt.draft.ahead import Ahead
from tlt.engine.exactness import Exactness, check_exactness
from tlt.engine.protocol import RolloutEngine
from tlt.metrics import peak_memory
from tlt.models.device import torch_device
from tlt.rl.choose import make_policy
from tlt.rl.dry_run import dry_run
from tlt.rl.parallel import Broken, GroupBroken, Join, Membership, Processes
from tlt.rl.parity import take_weights
from tlt.rl.sharded import ShardedPolicy
from tlt.rl.shards import Held
from tlt.rl.teacher import spot_trainer
from tlt.spot.saving import TrainerState
from tlt.spot.schedule import Evaluation, SpotReport
from tlt.spot.spot_worker import SpotWorker
from tlt.trace import Span, Tracer
from tlt.types import Request, Response, RolloutStats, Row, TrainBatch


class DecodeWork(NamedTuple):
    """Input of `Worker.decode`: changes to the rows that the worker already has, and options."""

    rollout: int
    """Number of the rollout. If it is new, the worker drops its rows of the previous rollout."""
    requests: Sequence[Request] = ()
    resumed: Sequence[Row] = ()
    drafts: Sequence[Ahead] = ()
    """look-ahead drafts for the new requests"""
    plain: bool = False
    """whether to use plain decoding, regardless of the recipe"""


class AheadWork(NamedTuple):
    """Input of `Worker.look_ahead`: requests of coming steps for an idle worker."""

    rollout: int
    requests: Sequence[Request]
    drafts: Sequence[Ahead]
    """look-ahead drafts so far for these requests and their siblings (requests with the same prompt)"""


class Slice(NamedTuple):
    """Result of `Worker.decode`, which decodes for a fraction of a second."""

    responses: list[Response]
    stats: RolloutStats
    """counters of this worker for the whole rollout so far"""
    live: dict[int, int]
    """number of tokens so far of each active row, by seed"""
    news: dict[int, list[int]]
    """tokens that active and waiting rows gained since the previous slice, by seed"""


class EarlySlice(NamedTuple):
    """Result of `Worker.early_update`: progress of an early shard, which is a part of the step's batch."""

    shard: int
    share_done: float
    seconds: float


class State(NamedTuple):
    """State that a new worker takes from another worker."""

    policy: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    version: int
    tuner: dict[str, Any]


class Worker:
    """Worker of a run.

    `folder`: folder of the policy to start from. `meets`: where workers meet to form a process group. It is a folder
    that they share on one machine, or this machine's address in the cluster. `join`: function that joins the group.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        folder: str | Path,
        meets: str | Path = "127.0.0.1",
        join: Join = Processes,
    ) -> None:
        self.config, self.index = config, index
        self.target = open_target(config, None)
        layer = starting_drafter(config, self.target.options)
        self.policy = make_policy(config, folder)
        take_weights(self.target, self.policy, version=0)
        trainer = spot_trainer(layer, self.target, self.policy, config, index) if layer else None
        self.spot = SpotWorker(trainer, lambda layer: self.engine.draft_with(layer))
        self.tracer = Tracer()
        self.engine = open_engine(config, self.target, layer, self.spot.harvest if layer else None, self.tracer)
        self.store = self.engine.store
        self.plain = self.engine.plain_engine()
        self.membership = Membership(meets, config.cluster.workers, torch_device(config.model), join)
        self._rollout = -1
        self._reported: dict[int, int] = {}  # number of tokens reported so far, by seed
        self._before: State | None = None  # state before the current update, for `rollback`
        self._wanted = 0.0  # idle calls with this number or a lower one must end
        gc.collect()
        gc.freeze()  # else a collection during a rollout would scan all loaded objects for 0.25 s

    # -- rollout -------------------------------------------------------------------------------------------------------

    def decode(self, work: DecodeWork, seconds: float) -> Slice:
        """Decode at least one round, until the seconds are over or all rows have finished. Raises ValueError for a
        request that cannot be decoded."""
        engine, other = (self.plain, self.engine) if work.plain else (self.engine, self.plain)
        self._enter_rollout(work.rollout, work.drafts, engine)
        began = time.perf_counter()  # after the start-up profile of the first rollout, which does not count
        other.release()
        engine.look_ahead(())
        self._reported |= {row.request.seed: len(row.tokens) for row in work.resumed}
        engine.submit(work.requests, work.resumed)
        responses: list[Response] = []
        while engine.busy:
            responses += engine.round()
            if time.perf_counter() - began >= seconds:
                break
        live = {row.request.seed: len(row.tokens) for row in engine.rows}
        return Slice(responses, engine.stats, live, self._news(engine))

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
            while self.engine.looks_ahead and self._wanted < number:
                self.engine.round()
                if time.perf_counter() - began >= seconds:
                    break
            self.engine.keep_ahead()
        known = [self.store.get(request) for request in work.requests]
        return [ahead for ahead in known if ahead and ahead.version == self.target.version]

    def _enter_rollout(self, number: int, drafts: Sequence[Ahead], engine: RolloutEngine) -> None:
        """Store these look-ahead drafts. If the rollout is new, drop the rows of the previous one."""
        self.store.put(drafts)
        if number != self._rollout:
            engine.start(())
            self._rollout = number

    # -- the drafter: faults here reduce speed only --------------------------------------------------------------------

    def interrupt(self, number: float) -> None:
        """End calls of idle work whose number is at most `number`, within a micro-batch or a round. If such a call has
        not begun yet, it ends at once when it begins. This method is called from another thread."""
        self._wanted = number

    def train_drafter(self, start: TrainerState | None, seconds: float, number: float = math.inf) -> SpotReport | None:
        """Train the drafter (`SpotWorker.train_drafter`). `number` identifies this call for `interrupt`. It is above 0
        and above the numbers of earlier calls of idle work."""
        with self.tracer.span("spot"):
            return self.spot.train_drafter(start, seconds, lambda: self._wanted >= number)

    def evaluate_drafter(self, start: TrainerState | None, number: float = math.inf) -> Evaluation | None:
        with self.tracer.span("judge"):
            return self.spot.evaluate_drafter(start, lambda: self._wanted >= number)

    def drafter_state(self) -> TrainerState | None:
        return self.spot.drafter_state()

    def take_drafter(self, state: TrainerState, acceptance: float | None) -> None:
        self.spot.take_drafter(state, acceptance)

    def forget_older_data(self) -> None:
        self.spot.forget_older_data()

    def rollout_ended(self) -> None:
        self.spot.rollout_ended()

    # -- update --------------------------------------------------------------------------------------------------------

    def rendezvous(self) -> str:
        return self.membership.open_rendezvous()

    def shard_policy(self, rendezvous: Any, rank: int, size: int) -> None:
        """Keep only this member's shard of the policy. Call this before all other uses of a sharded policy. Raises
        GroupBroken."""
        assert isinstance(self.policy, ShardedPolicy)
        self.policy.shard_over(self.membership.enter(rendezvous, rank, size))

    def check_at_start(self, longest_prompt: int) -> Exactness:
        """Return whether the engine is exact. Raise ConfigError if an update does not fit the memory."""
        self.engine.release()
        dry_run(self.policy, self.config, longest_prompt)
        return check_exactness(self.target)

    def early_update(
        self, shard: int, batch: TrainBatch, seconds: float, number: float = math.inf
    ) -> EarlySlice | None:
        """Begin or continue the computation of an early shard's gradients or log-probs. Return the progress. `shard`:
        number of the shard. `batch`: its responses. `number`: see `train_drafter`.

        The call ends after a micro-batch if the seconds are over, the shard is complete, or `interrupt` was called. If
        the memory does not suffice, all early results of this worker are dropped and None is returned."""
        began, done = time.perf_counter(), 0.0

        def stop() -> bool:
            return self._wanted >= number or time.perf_counter() - began >= seconds

        try:
            with self.tracer.span("early"):
                if self._wanted < number:
                    done = self.policy.early_update(shard, batch, stop)
        except torch.OutOfMemoryError:
            self.policy.forget_early()
            torch.cuda.empty_cache()
            return None
        return EarlySlice(shard, done, time.perf_counter() - began)

    def update(
        self,
        batch: TrainBatch,
        step: int,
        rendezvous: Any,
        rank: int,
        size: int,
        held: Held = (),
    ) -> dict[str, float] | Broken:
        """Compute this member's part of the update, as member `rank` of `size`. `held`: for each member, the early
        shards that it has begun and the fraction done. Return the metrics of the update. If another member is lost,
        return Broken, and `rollback` must follow. A sharded policy has no state to restore, and raises GroupBroken."""
        self.engine.release()
        self._before = self.state() if size > 1 and not self.config.train.shard else None
        try:
            with self.tracer.span("update"):
                return self.policy.update(batch, step, self.membership.enter(rendezvous, rank, size), held)
        except GroupBroken as error:
            self.membership.leave()
            if self._before is None:
                raise
            return Broken(str(error))
        except Exception:
            self.membership.leave()  # so that the others do not wait for this member
            raise

    @property
    def updated(self) -> float:
        """Fraction of the current update that is done. It is read from another thread."""
        return self.policy.updated

    def rollback(self) -> None:
        """Restore the policy and the optimizer as they were before the update."""
        self.membership.leave()
        if self._before:
            self._restore(self._before)

    def sync(self, version: int) -> None:
        """Load the policy's weights into the engine. After this the update can no longer be rolled back."""
        self._before = None
        with self.tracer.span("sync"):
            take_weights(self.target, self.policy, version)
            self.spot.target_moved()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return the state of this worker for a new one. During an update, return the state before it."""
        return self._before or State(
            _copies(self.policy.trained_state()),
            _copies(self.policy.optimizer_state()),
            self.target.version,
            self.engine.tuner.state(),
        )

    def take_state(self, state: State) -> None:
        """Load this state of another worker, so that this new worker can replace a lost one."""
        self._restore(state)
        take_weights(self.target, self.policy, state.version)
        self.engine.tuner.load_state(state.tuner)
        self.spot.target_moved()

    def _restore(self, state: State) -> None:
        self.policy.forget_early()
        self.policy.load_state_dict(state.policy)
        self.policy.load_optimizer_state(state.optimizer)
        self._before = None

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        return self.policy.logprobs(batch)

    def policy_state(self) -> dict[str, Tensor]:
        return _copies(self.policy.state_dict())

    def sha256(self) -> str:
        return self.policy.sha256()

    def save(self, folder: str) -> None:
        self.policy.save(Path(folder))

    def load_optimizer(self, folder: str) -> None:
        self.policy.load_optimizer(Path(folder))

    def trace(self) -> list[Span]:
        """Return the recorded spans of time since the last call of this method."""
        return self.tracer.drain()

    def peak_memory(self) -> dict[str, float]:
        return peak_memory()

    def tuner_state(self) -> dict[str, Any]:
        return self.engine.tuner.state()

    def load_tuner_state(self, state: Mapping[str, Any]) -> None:
        self.engine.tuner.load_state(state)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors in host memory. They do not change when the originals change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
