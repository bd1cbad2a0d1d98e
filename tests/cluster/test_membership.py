"""The process group of a worker."""

from __future__ import annotations

from typing import Any

import torch

from tlt.cluster.membership import Membership
from tlt.rl.parallel import Alone


def test_a_worker_leaves_its_group_before_it_joins_another() -> None:
    log: list[Any] = []

    class Group(Alone):
        def leave(self) -> None:
            log.append("leave")

    def join(rendezvous: Any, rank: int, size: int, workers: int, device: torch.device) -> Group:
        log.append((rendezvous, rank, size, workers))
        return Group()

    membership = Membership("127.0.0.1", 4, torch.device("cpu"), join)
    membership.leave()
    first = membership.enter("a", 1, 3)
    assert membership.enter("a", 1, 3) is first
    assert membership.enter("b", 0, 2) is not first
    membership.leave()
    membership.leave()
    assert log == [("a", 1, 3, 4), "leave", ("b", 0, 2, 4), "leave"]
