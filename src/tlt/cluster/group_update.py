"""Update of the policy on many workers. If a worker is lost, the update is repeated."""

from __future__ import annotations

from tlt.cluster.early_update import EarlyUpdate
from tlt.cluster.pool import ClusterError
from tlt.cluster.supervisor import Supervisor
from tlt.types import TrainBatch

_ATTEMPTS = 5  # maximum number of attempts that fail although no worker is lost
_ANSWERS = 0.5  # timeout in seconds for a worker's report on the progress of its update


class GroupUpdate:
    """Update of the policy by all present workers together, and its progress."""

    def __init__(self, supervisor: Supervisor, early: EarlyUpdate) -> None:
        self.supervisor, self.early = supervisor, early
        self.done = 0.0
        """fraction of the current update (0 to 1) that the slowest worker had done at the last check"""
        self._rendezvous: tuple[str, object] | None = None

    def shard_policy(self) -> None:
        """Form a process group of all workers. Each keeps only its own shard of the policy. Raises ClusterError."""
        members = self.supervisor.present
        rendezvous = self._rendezvous_of(members)
        self.supervisor.call_jointly(
            "shard_policy", {i: (rendezvous, rank, len(members)) for rank, i in enumerate(members)}
        )

    def run(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Update the policy on all present workers. Each computes its shards of the batch. If a worker is lost during
        the update, the others restore the state before the update, and the replacement takes that state too. Then the
        update is repeated on the same shards. Raises ClusterError."""
        given, left = self.supervisor.pool.put(batch), _ATTEMPTS
        while left:
            losses = self.supervisor.losses
            self.supervisor.wait_until_ready()
            members = self.supervisor.present
            rendezvous = self._rendezvous_of(members)
            held = self.early.held_by(members)
            work = {i: (given, step, rendezvous, rank, len(members), held) for rank, i in enumerate(members)}
            reports = self.supervisor.call_jointly("update", work, self.read_progress)
            self.done = 0.0
            self.early.begin(None)
            if reports:
                return reports[0]
            self._rendezvous = None
            self.supervisor.call_all("rollback")
            left -= self.supervisor.losses == losses
        raise ClusterError(f"the update of step {step + 1} failed {_ATTEMPTS} times; {self.supervisor.trouble}")

    def read_progress(self) -> None:
        self.done = min(self.supervisor.pool.updated(index, _ANSWERS) or 0.0 for index in self.supervisor.present)

    def _rendezvous_of(self, members: list[int]) -> str:
        """Return the address where these workers form their process group. It changes after every loss of a worker and
        every change of members."""
        now = self.supervisor.losses, members
        if self._rendezvous is None or self._rendezvous[1] != now:
            self._rendezvous = self.supervisor.call_one("rendezvous"), now
        return self._rendezvous[0]
