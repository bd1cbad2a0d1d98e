"""Rollouts for verl, which tlt decodes if `actor_rollout_ref.rollout.name=tlt`. verl loads `verl_plugin.py`, which
registers `Replica` and `ServerAdapter`.

A replica is an engine in a Ray actor (`verl_server.py`) on the device of one trainer process. That process has a
`ServerAdapter`, which sends the weights to the replica after an update.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.utils.device import get_resource_name
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from tlt.integrations import UnsupportedError, refuse_version
from tlt.integrations.verl_server import Server
from tlt.integrations.verl_terms import TESTED, refuse


class ServerAdapter(BaseRollout):
    """verl's interface to a replica, in a trainer process. There is one for each replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        refuse(self.config)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._server: Any = None

    @property
    def server(self) -> Any:
        """Ray actor of the replica. The adapter looks it up at first use, because the actor is launched after the
        adapter is created."""
        self._server = self._server or ray.get_actor(_actor_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        await self.server.wake_up.remote(tags)

    async def release(self) -> None:
        await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Send whole tensors by their Hugging Face names to the replica, through host memory in buckets. Raises
        UnsupportedError for another wire format, and for LoRA weights that are not merged."""
        if wire_format != "named_tensors":
            raise UnsupportedError(f"tlt does not support verl's wire format {wire_format!r}: use named_tensors")
        if kwargs.get("peft_config") is not None:
            raise UnsupportedError("tlt needs merged weights from verl: set actor_rollout_ref.model.lora.merge=True")
        most = self.config.checkpoint_engine.update_weights_bucket_megabytes * 2**20
        async for bucket in _buckets(weights, most):
            await self.server.take_weights.remote(bucket)
        await self.server.load_weights.remote(global_steps)


async def _buckets(weights: Iterable[tuple[str, Tensor]], most: int) -> AsyncIterator[dict[str, Tensor]]:
    """Yield buckets (name -> copy in host memory) of the weights. They are copies, because the trainer may reuse its
    buffers. A bucket has at most `most` bytes, unless a single tensor is larger."""
    bucket: dict[str, Tensor] = {}
    size = 0
    async for name, tensor in ensure_async_iterator(weights):
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        if bucket and size + copy.nbytes > most:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = copy
        size += copy.nbytes
    yield bucket


class Replica(RolloutReplica):
    """Replica with one server on the device of one trainer process. verl creates it and reads its `server_handle`."""

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, *args, **kwargs)
        refuse_version("verl", "verl", TESTED)
        refuse(self.config)

    async def launch_servers(self) -> None:
        (worker,) = self.workers
        node, device = await worker.__ray_call__.remote(_place)
        name = _actor_name(self.replica_rank, self.is_reward_model, self.is_teacher_model, self.name_suffix)
        environment = {"CUDA_VISIBLE_DEVICES": device, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        server = (
            ray.remote(Server)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                runtime_env={"env_vars": environment if device else {}},
                name=name,
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config, self.model_config.local_path or self.model_config.path, self.replica_rank)
        )
        await server.__ray_ready__.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = name  # verl identifies servers by their address; this one has no HTTP


def _place(_: Any) -> tuple[str, str]:
    """Return (node id, device ids) of a trainer process; the device ids are empty on a CPU."""
    context = ray.get_runtime_context()
    return context.get_node_id(), ",".join(context.get_accelerator_ids().get(get_resource_name(), []))


def _actor_name(replica: int, is_reward: bool = False, is_teacher: bool = False, suffix: str = "") -> str:
    role = "reward_" if is_reward else "teacher_" if is_teacher else ""
    return f"tlt_server_{role}{replica}{suffix}"
