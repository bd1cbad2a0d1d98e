"""Rollout on one worker or many, and policy on many, behind the protocols of the training loop (loop.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt.cluster.coordinator import Coordinator
from tlt.cluster.drafter_training import DrafterTraining
from tlt.cluster.pool import ClusterError, LocalPool, Pool
from tlt.cluster.supervisor import Supervisor
from tlt.cluster.worker import Worker
from tlt.config import Config
from tlt.engine.exactness import Exactness
from tlt.environments.episodes import Turns
from tlt.trace import Span
from tlt.types import Request, Response, RolloutStats, TrainBatch, WorkerNow

_ATTEMPTS = 5  # maximum number of attempts that fail although no worker is lost
_ANSWERS = 0.5  # timeout in seconds for a worker's report on the progress of its update


class ClusterRollout:
    """Rollout on all workers. The coordinator distributes the requests."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator, self.supervisor = coordinator, coordinator.supervisor

    def sync(self, policy: Any, version: int) -> None:
        """Load the weights of each worker's replica into its engine. `policy` is not used."""
        self.coordinator.sync(version)

    def generate(
        self, requests: Sequence[Request], on_response: Callable[[Response], None], coming: Iterable[list[Request]] = ()
    ) -> tuple[list[Response], RolloutStats]:
        return self.coordinator.generate(requests, on_response, coming)

    def generate_plain(self, requests: Sequence[Request], on_response: Callable[[Response], None]) -> list[Response]:
        return self.coordinator.generate_plain(requests, on_response)

    def state(self) -> dict[str, Any]:
        return {"tuner": self.supervisor.call_one("tuner_state"), "drafter": self.coordinator.idle.training.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.supervisor.call_all("load_tuner_state", state["tuner"])
        self.coordinator.idle.training.load_state(state.get("drafter", {}))

    def save_history(self, folder: Path) -> None:
        self.coordinator.idle.ahead.history.save(folder)

    def load_history(self, folder: Path) -> None:
        self.coordinator.idle.ahead.history.load(folder)

    def release(self) -> None:
        self.coordinator.release()

    def now(self) -> Sequence[WorkerNow]:
        return self.coordinator.now

    def trace(self) -> list[list[Span]]:
        states = [tracer.drain() for tracer in self.coordinator.tracers]
        work = self.supervisor.call_all("trace")
        return [state + work.get(index, []) for index, state in enumerate(states)]

    def peak_memory(self) -> dict[str, dict[str, float]]:
        if not self.supervisor.pool.is_concurrent:
            return {}
        return {f"worker {index}": peak for index, peak in self.supervisor.call_all("peak_memory").items()}

    def close(self) -> None:
        self.coordinator.idle.training.close()
        self.coordinator.turns.close()
        self.supervisor.pool.close()


class ClusterPolicy:
    """Policy on the workers. Each worker has a replica, so one worker computes log-probs and saves. If the policy is
    sharded, all workers do this together. An update is that of all present workers together."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.version: int | None = 0
        self.updated = 0.0
        """fraction of the current update (0 to 1) that the slowest worker had done at the last check"""
        self._rendezvous: tuple[str, object] | None = None

    def shard(self) -> None:
        """Form a process group of all workers. Each keeps only its own shard of the policy. Raises ClusterError."""
        self.supervisor.call_jointly("shard_policy", self._members())

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Update the policy. If a worker is lost during the update, the others restore the state before the update, and
        the replacement takes that state too. Then the update is repeated on the same shards. Raises ClusterError, or
        the exception of a worker. After an error, `version` is `step` if the remaining workers restored the state
        before the update, else None."""
        self.version, given, left = None, self.supervisor.pool.put(batch), _ATTEMPTS
        try:
            while left:
                losses = self.supervisor.losses
                self.supervisor.wait_until_ready()
                work = {index: (given, step, *place) for index, place in self._members().items()}
                reports = self.supervisor.call_jointly("update", work, self.read_progress)
                self.updated = 0.0
                if reports:
                    self.version = step + 1
                    return reports[0]
                self._rendezvous = None
                self.supervisor.call_all("rollback")
                left -= self.supervisor.losses == losses
            raise ClusterError(f"the update of step {step + 1} failed {_ATTEMPTS} times; {self.supervisor.trouble}")
        except Exception:
            if not self.supervisor.shards:
                with suppress(Exception):  # the error of the update is more important
                    self.supervisor.call_all("rollback")
                    self.version = step
            raise

    def read_progress(self) -> None:
        pool = self.supervisor.pool
        self.updated = min(pool.updated(index, _ANSWERS) or 0.0 for index in self.supervisor.present)

    def _members(self) -> dict[int, tuple[str, int, int]]:
        """Return for each present worker the address where the workers form their process group, its rank, and the
        number of members. The address changes after every loss of a worker and every change of members."""
        if self._rendezvous is None or self._rendezvous[1] != (self.supervisor.losses, self.supervisor.present):
            address = self.supervisor.call_one("rendezvous")
            self._rendezvous = address, (self.supervisor.losses, self.supervisor.present)
        members = self.supervisor.present
        return {index: (self._rendezvous[0], rank, len(members)) for rank, index in enumerate(members)}

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        return self.supervisor.call_for_policy("logprobs", batch)

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.supervisor.call_for_policy("policy_state")

    def save(self, folder: Path) -> None:
        """Let the workers write the policy's files to a folder that the driver sees too."""
        self.supervisor.call_for_policy("save", str(folder.resolve()))

    def load_optimizer(self, folder: Path) -> None:
        self.supervisor.call_all("load_optimizer", str(folder.resolve()))

    def sha256(self) -> str:
        """Return the policy's sha256, which every worker computes. Raises ClusterError if the hashes differ."""
        digests = list(self.supervisor.call_all("sha256").values())
        if len(set(digests)) > 1:
            hashes = ", ".join(digest[:8] for digest in digests)
            raise ClusterError(f"the workers' policies differ (hashes {hashes}): continue from the newest checkpoint")
        return digests[0]


def local_rollout(worker: Worker, config: Config, turns: Turns | None = None) -> ClusterRollout:
    """Return the rollout of one worker in this process."""
    supervisor = Supervisor(LocalPool(worker))
    layer = worker.spot.trainer.in_use if worker.spot.trainer else None
    training = DrafterTraining(supervisor, config, worker.target.options, layer)
    return ClusterRollout(Coordinator(supervisor, config, turns, training))


def join(
    pool: Pool, config: Config, turns: Turns, longest_prompt: int
) -> tuple[ClusterRollout, ClusterPolicy, Exactness]:
    """Return the rollout and the policy of a pool's workers, and whether their engines are exact. Check that all
    present workers have the same policy, and that an update fits their memory. `longest_prompt` is in tokens. Raises
    ClusterError, ConfigError."""
    try:
        cluster = config.cluster
        supervisor = Supervisor(pool, config.train.shard, cluster.patience, cluster.min_workers or 1, cluster.grace)
        coordinator = Coordinator(supervisor, config, turns)
        policy = ClusterPolicy(supervisor)
        policy.sha256()  # also waits until all workers run, because a rendezvous has a short timeout
        if config.train.shard:
            policy.shard()
        exactness = Exactness.of_all(supervisor.call_all("check_at_start", longest_prompt).values())
    except BaseException:
        pool.close()
        raise
    return ClusterRollout(coordinator), policy, exactness
