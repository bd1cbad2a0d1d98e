"""Worker of a run, which has a replica of the policy. All workers of a run update their replicas together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tlt.build import open_target
from tlt.cluster.worker import Worker, decoding_parts
from tlt.config import Config
from tlt.engine.engine import Engine
from tlt.engine.exactness import Exactness, check_exactness
from tlt.engine.memory import free_bytes
from tlt.engine.protocol import RolloutEngine
from tlt.models.device import torch_device
from tlt.rl.dry_run import dry_run, own_bytes
from tlt.rl.parallel import Broken, GroupBroken, Join, Membership, Processes
from tlt.rl.parity import check_wide_parity, take_weights
from tlt.rl.policy import Policy, trained_parameters
from tlt.rl.sharded import ShardedPolicy, make_policy
from tlt.spot.spot_worker import SpotWorker
from tlt.types import Prompt, Request, SamplingParams, TrainBatch

CPU = torch.device("cpu")
_MARGIN = 1.2  # on the measured memory of an update, because free memory is in pieces


class State(NamedTuple):
    """State that a new worker takes from another worker."""

    policy: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    version: int
    tuner: dict[str, Any]


class RunWorker(Worker):
    """Worker with a replica of the policy.

    `meets`: where workers meet to form a process group. It is a folder that they share on one machine, or this
    machine's address in the cluster. `join`: function that joins the group.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        spot: SpotWorker | None,
        policy: Policy,
        meets: str | Path = "127.0.0.1",
        join: Join = Processes,
    ) -> None:
        super().__init__(config, engine, spot)
        self.policy = policy
        self.membership = Membership(meets, config.cluster.workers, torch_device(config.model), join)
        self._before: State | None = None  # state before the current update, for `rollback`
        self._needed = math.inf  # bytes that an update needs in addition to weights and Adam's moments

    @classmethod
    def of_run(
        cls, config: Config, index: int, folder: str | Path, meets: str | Path = "127.0.0.1", join: Join = Processes
    ) -> Self:
        """Return worker `index` of a run. `folder`: folder of the policy to start from."""
        target, policy = open_target(config, None), make_policy(config, folder)
        take_weights(target, policy, version=0)
        check_wide_parity(target, policy)
        return cls(config, *decoding_parts(config, target, index), policy, meets, join)

    # -- update --------------------------------------------------------------------------------------------------------

    def rendezvous(self) -> str:
        return self.membership.open_rendezvous()

    def shard_policy(self, rendezvous: Any, rank: int, size: int) -> None:
        """Keep only this member's shard of the policy. Call this before all other uses of a sharded policy. Raises
        GroupBroken."""
        assert isinstance(self.policy, ShardedPolicy)
        self.policy.shard_over(self.membership.enter(rendezvous, rank, size))

    def check_at_start(self, longest_prompt: int) -> Exactness:
        """Return whether the engine is exact. Raise ValueError if the longest possible sequence does not fit the
        key-value cache, or an update the memory."""
        params = SamplingParams(max_new_tokens=self.config.rollout.max_new_tokens)
        self.engine.submit([Request(Prompt(0, "", (0,) * longest_prompt), 0, 0, 0, params)])
        self.engine.release_requests([0])
        self.engine.release()
        self._needed = dry_run(self.policy, self.config, longest_prompt)
        return check_exactness(self.target)

    def release(self) -> None:
        """Free the engine's memory for the update that follows. If the engine has CUDA graphs, which need the addresses
        of its key-value cache, and the memory suffices without that, do nothing."""
        captures = isinstance(self.engine, Engine) and self.engine.runner.graphs
        has_moments = bool(self.policy.optimizer.state)
        if not (captures and has_moments and free_bytes(self.target.device) > _MARGIN * self._needed):
            super().release()

    def update(self, batch: TrainBatch, step: int, rendezvous: Any, rank: int, size: int) -> dict[str, float] | Broken:
        """Compute this member's part of the update, as member `rank` of `size`. Return the metrics of the update. If
        another member is lost, return Broken, and `rollback` must follow. A sharded policy has no state to restore, and
        raises GroupBroken."""
        keeps = size > 1 and not self.config.train.shard
        self._before = self.state(place_of_copy(self.policy, self._needed)) if keeps else None
        try:
            with self.tracer.span("update"):
                return self.policy.update(batch, step, self.membership.enter(rendezvous, rank, size))
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

    def state(self, device: torch.device = CPU) -> State:
        """Return a copy of this worker's state, for a new worker by default. During an update, return the state before
        it."""
        if now := self._before:
            return now._replace(policy=_copies(now.policy, device), optimizer=_copies(now.optimizer, device))
        policy, optimizer = (_copies(x, device) for x in (self.policy.trained_state(), self.policy.optimizer_state()))
        return State(policy, optimizer, self.target.version, self.engine.tuner.state())

    def take_state(self, state: State) -> None:
        """Load this state of another worker, so that this new worker can replace a lost one."""
        self._restore(state)
        take_weights(self.target, self.policy, state.version)
        self.engine.tuner.load_state(state.tuner)
        self.spot.target_moved()

    def _restore(self, state: State) -> None:
        self.policy.load_state_dict(state.policy)
        self.policy.load_optimizer_state(state.optimizer)
        self._before = None

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        return self.policy.logprobs(batch)

    def policy_state(self) -> dict[str, Tensor]:
        return _copies(self.policy.state_dict(), CPU)

    def sha256(self) -> str:
        return self.policy.sha256()

    def save(self, folder: str) -> None:
        self.policy.save(Path(folder))

    def load_optimizer(self, folder: str) -> None:
        self.policy.load_optimizer(Path(folder))


def place_of_copy(policy: Policy, needed: float) -> torch.device:
    """Return the policy's device if it has room for a copy of weights and moments during an update that needs `needed`
    bytes more, else the host, because a copy in host memory takes seconds."""
    copy = 3 * own_bytes(trained_parameters(policy.model))
    fits = bool(policy.optimizer.state) and free_bytes(policy.device) > _MARGIN * (needed + copy)
    return policy.device if fits else CPU


def _copies(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return copies of the tensors. They do not change when the originals change."""
    return {name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()}
