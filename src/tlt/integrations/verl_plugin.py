"""Plugin that verl loads if tlt is installed (entry point `verl.plugins`). It registers `rollout.name=tlt_vllm`."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # verl's guide for new engines imports it too
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "tlt_vllm"


def _replica() -> type[Any]:
    from tlt.integrations.verl import NoisyReplica

    return NoisyReplica


RolloutReplicaRegistry.register(NAME, _replica)
_ROLLOUT_REGISTRY[(NAME, "async")] = "verl.workers.rollout.vllm_rollout.ServerAdapter"
