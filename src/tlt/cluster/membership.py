"""Membership of a worker in the process group that computes an update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tlt.rl.parallel import ProcessGroup, Rendezvous

Join = Callable[[Any, int, int, int, torch.device], ProcessGroup]
"""function that joins a process group: (address of the rendezvous, rank, number of members, number of workers in the
recipe, device) -> process group"""


class Membership:
    """Process group that this worker is a member of. `workers`: number of workers in the recipe. `meets`: where workers
    meet to form a group. It is a folder that they share on one machine, or this machine's address in the cluster."""

    def __init__(self, meets: str | Path, workers: int, device: torch.device, join: Join) -> None:
        self.meets, self.workers, self.device, self._join = meets, workers, device, join
        self._rendezvous: Rendezvous | None = None
        self._group: tuple[Any, ProcessGroup] | None = None

    def open_rendezvous(self) -> str:
        """Open a rendezvous, where members of a new group meet, and return its address. It stays open until the next
        call of this method."""
        self._rendezvous = Rendezvous(self.meets)
        return self._rendezvous.address

    def enter(self, rendezvous: Any, rank: int, size: int) -> ProcessGroup:
        """Join the process group that meets at this address, as member `rank` of `size`, and return it. If the worker
        is in another group, it leaves that one first."""
        if self._group is None or self._group[0] != rendezvous:
            self.leave()
            self._group = rendezvous, self._join(rendezvous, rank, size, self.workers, self.device)
        return self._group[1]

    def leave(self) -> None:
        """Leave the group, if there is one. A group that lost a member cannot be used again."""
        if self._group:
            self._group[1].leave()
        self._group = None
