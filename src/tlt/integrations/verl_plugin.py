"""Plugin that verl loads if tlt is installed (entry point `verl.plugins`). It registers `rollout.name=tlt`."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # verl's guide for new engines imports it too
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "tlt"


def _replica() -> type[Any]:
    from tlt.integrations.verl import Replica

    return Replica


RolloutReplicaRegistry.register(NAME, _replica)
_ROLLOUT_REGISTRY[(NAME, "async")] = "tlt.integrations.verl.ServerAdapter"
