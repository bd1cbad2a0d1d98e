"""Early update with many workers: which idle worker computes which early shard, and the progress of each shard.

An early shard is a part of the step's batch whose responses have finished before the rollout ends (rl/early.py). Its
gradients or log-probs stay with the worker that computed them. A worker computes one shard at a time and continues an
unfinished one. Shards of a lost worker are computed again by another one, in the rollout or in the update.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

from tlt.cluster.supervisor import Done, Supervisor
from tlt.config import TrainConfig
from tlt.rl.early import PER_WORKER, EarlyGroups, has_early_gradients

log = logging.getLogger(__name__)

METHOD = "early_update"


class EarlyUpdate:
    """Early shards of the current rollout, the workers that compute them, and their progress."""

    def __init__(self, supervisor: Supervisor, train: TrainConfig) -> None:
        self.supervisor = supervisor
        self.most: float = PER_WORKER if has_early_gradients(train) else math.inf
        """maximum number of early shards of a worker; unlimited for log-probs, because they take little memory"""
        self._groups: EarlyGroups | None = None
        self._begun: dict[int, tuple[int, float]] = {}  # shard -> worker that computes it, fraction done
        self._unable = set[int]()  # workers whose memory is too small for early shards
        self._seconds = 0.0

    def begin(self, groups: EarlyGroups | None) -> None:
        """Forget all early shards, because a rollout begins or an update has ended. `groups` gives the early shards of
        the rollout; None if nothing is computed early."""
        self._groups, self._begun = groups, {}

    def next_call(self, worker: int, so_far: Callable[[], Mapping[int, int]], seconds: float) -> bool:
        """Let an idle worker compute an early shard for about `seconds` seconds. Return whether there is one. `so_far`:
        function that returns the number of tokens of each unfinished response, by seed."""
        if self._groups is None or worker in self._unable:
            return False
        shards = self._groups.shards(so_far())
        own = [k for k, (holder, share) in self._begun.items() if holder == worker and share < 1.0]
        free = [k for k in range(len(shards)) if k not in self._begun]
        if sum(holder == worker for holder, _ in self._begun.values()) >= self.most:
            free = []
        if not own and not free:
            return False
        shard = (own or free)[0]
        self._begun.setdefault(shard, (worker, 0.0))
        self.supervisor.call_idle(worker, METHOD, shard, shards[shard], seconds)
        return True

    def handle_result(self, done: Done) -> None:
        """Record the progress of an early shard after a call that returned, or forget the shards of a lost worker."""
        if done.lost:
            self._forget(done.worker)
        elif done.method == METHOD and done.result is None:
            log.warning("worker %d has too little memory for the early update; this worker skips it", done.worker)
            self._unable.add(done.worker)
            self._forget(done.worker)
        elif done.method == METHOD:
            self._seconds += done.result.seconds
            if self._begun.get(done.result.shard, (-1, 0.0))[0] == done.worker:  # else the shard is outdated
                self._begun[done.result.shard] = done.worker, done.result.share_done

    def _forget(self, worker: int) -> None:
        self._begun = {shard: begun for shard, begun in self._begun.items() if begun[0] != worker}

    def held_by(self, workers: Sequence[int]) -> list[dict[int, float]]:
        """Return the early shards that each worker has begun, as one {shard: fraction done} for each worker."""
        return [{k: share for k, (holder, share) in self._begun.items() if holder == worker} for worker in workers]

    def take_seconds(self) -> float:
        """Return the total seconds of early-update calls that returned since the last call of this method."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
