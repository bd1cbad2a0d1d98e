"""Early update with many workers: assignment of early shards to idle workers, and the progress of each shard.

Gradients and log-probs stay with the workers that computed them. A worker computes one shard at a time and continues an
unfinished one. Shards of a lost worker are computed again by another one, in the rollout or in the update.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from tlt.cluster.crew import Crew, Done
from tlt.config import TrainConfig
from tlt.rl.early import PER_WORKER, EarlyGroups, has_early_gradients

log = logging.getLogger(__name__)

METHOD = "early_update"


class EarlyUpdate:
    """Early shards of a rollout and the workers that compute them."""

    def __init__(self, crew: Crew, train: TrainConfig) -> None:
        self.crew = crew
        self.most: float = PER_WORKER if has_early_gradients(train) else math.inf
        """maximum number of early shards per worker; unlimited for log-probs, because they take little memory"""
        self._groups: EarlyGroups | None = None
        self._begun: dict[int, tuple[int, float]] = {}  # shard -> worker that computes it, and the share that is done
        self._unable = set[int]()  # workers whose memory is too small
        self._seconds = 0.0

    def begin(self, groups: EarlyGroups | None) -> None:
        """Begin a rollout of these groups; None if nothing is computed early."""
        self._groups, self._begun = groups, {}

    def next_call(self, worker: int, so_far: Mapping[int, int], seconds: float) -> bool:
        """Let an idle worker compute an early shard for about this many seconds. Return whether there is
        one. `so_far`: tokens of unfinished responses by seed."""
        if self._groups is None or worker in self._unable:
            return False
        shards = self._groups.shards(so_far)
        own = [k for k, (holder, share) in self._begun.items() if holder == worker and share < 1.0]
        free = [k for k in range(len(shards)) if k not in self._begun]
        if sum(holder == worker for holder, _ in self._begun.values()) >= self.most:
            free = []
        if not own and not free:
            return False
        shard = (own or free)[0]
        self._begun.setdefault(shard, (worker, 0.0))
        self.crew.call_idle(worker, METHOD, shard, shards[shard], seconds)
        return True

    def handle_result(self, done: Done) -> None:
        """Handle a call that returned, or a lost worker."""
        if done.lost:
            self._forget(done.worker)
        elif done.method == METHOD and done.result is None:
            log.warning("worker %d has too little memory for the early update; continuing without it", done.worker)
            self._unable.add(done.worker)
            self._forget(done.worker)
        elif done.method == METHOD:
            self._seconds += done.result.seconds
            if self._begun.get(done.result.shard, (-1, 0.0))[0] == done.worker:  # else it began in an earlier wave
                self._begun[done.result.shard] = done.worker, done.result.share_done

    def _forget(self, worker: int) -> None:
        self._begun = {shard: begun for shard, begun in self._begun.items() if begun[0] != worker}

    def held_by(self, workers: Sequence[int]) -> list[dict[int, float]]:
        """Return the shards that each of these workers has begun, with the share that is done."""
        return [{k: share for k, (holder, share) in self._begun.items() if holder == worker} for worker in workers]

    def take_seconds(self) -> float:
        """Return the seconds of all calls that returned since the last call of this method."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
