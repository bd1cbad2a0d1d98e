"""Policy sharded by FSDP2, for models whose weights, gradients and Adam moments do not fit one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tlt.config import Config
from tlt.models import weights
from tlt.models.device import torch_device, torch_dtype
from tlt.models.hugging_face import checkpointable_layers, save_model
from tlt.rl.batching import MicroBatch
from tlt.rl.logprobs import Forward, TransformersForward
from tlt.rl.lora import AdaptedPolicy
from tlt.rl.parallel import Alone, ProcessGroup, broken, sum_gradients
from tlt.rl.passes import Passes
from tlt.rl.policy import Policy, trained_parameters
from tlt.types import TrainBatch


class ShardedPasses(Passes):
    """Passes through sharded layers. All members of the group take part in every pass."""

    def forward_of(self, model: Any, autocast: bool) -> Forward:
        """Return the forward pass by transformers' own code, because FSDP2 gathers weights when layers are called."""
        return TransformersForward(model, autocast)

    def micro_batches(
        self, models: Sequence[Any], batch: TrainBatch, members: Sequence[int], group: ProcessGroup | None = None
    ) -> Iterator[MicroBatch]:
        """Yield this member's micro-batches, then do empty passes until all members have done the same number of
        passes."""
        own = torch.tensor([len(self.packer.plan(batch, members))], device=self.device)
        missing = int((group or Alone()).gather(own).max() - own)
        yield from super().micro_batches(models, batch, members, group)
        for _ in range(missing):
            for model in models:
                self._pass_nothing(model)

    def _pass_nothing(self, model: Any) -> None:
        """Pass one token without a target through the model, forward and, if gradients are on, backward. Its gradient
        is 0."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        nothing = MicroBatch([], token, token, token[0, :0], token[0, :0], None)
        logprobs, _ = self.logprobs(model, nothing)
        if torch.is_grad_enabled():
            logprobs.sum().backward()


class ShardedPolicy(Policy):
    """Policy whose decoder layers are sharded over the members of a group.

    After `shard_over` each member holds its part of every tensor of the decoder layers, of their gradients and moments,
    and of the reference model's layers. All members hold embedding, final norm and head, because these are used outside
    the layers. All members make each call that reads or changes the policy, in the same order. The shards of a lost
    member exist only in checkpoints. With autocast, bfloat16 copies of the layers stay in memory from the forward to
    the backward pass, 2 bytes per parameter, unless `gradient_checkpointing` is on.
    """

    passes_type = ShardedPasses
    home = torch.device("cpu")  # because the whole model may not fit the device
    fused = False  # fused AdamW cannot mix sharded and whole tensors
    group: ProcessGroup = Alone()  # until `shard_over` the policy is whole

    def shard_over(self, group: ProcessGroup) -> None:
        """Drop all but this member's shards. `group` has all processes of torch.distributed's default group."""
        self.group = group
        assert dist.group.WORLD, "sharding needs a process group"
        mesh = DeviceMesh.from_group(dist.group.WORLD, self.device.type)
        for model in [self.model, *([self.reference] if self.reference else [])]:
            shard_layers(model, mesh)
            model.to(self.device)
        self.optimizer = self._make_optimizer()

    # -- update -------------------------------------------------------------------------------------------------------

    def update(self, batch: TrainBatch, step: int, group: ProcessGroup | None = None) -> dict[str, float]:
        """Update the policy. The result is that of an unsharded policy up to the rounding of sums. `group` is not used,
        because the group is that of `shard_over`. Raises NotFinite, GroupBroken."""
        try:
            return super().update(batch, step, self.group)
        except RuntimeError as error:
            raise broken(error) or error from None

    def logprobs(self, batch: TrainBatch, group: ProcessGroup | None = None) -> list[list[float]]:
        """Return the log-probs of each response's sampled tokens, the same on every member. Raises GroupBroken."""
        try:
            return super().logprobs(batch, self.group)
        except RuntimeError as error:
            raise broken(error) or error from None

    def own_weights(self) -> Iterable[tuple[str, Tensor]]:
        return [(name, _local(parameter)) for name, parameter in self.model.named_parameters()]

    def _clip(self, group: ProcessGroup, taken: Sequence[Sequence[Tensor]], total: int) -> Tensor:
        """Divide and clip the gradients, and return their norm before clipping.

        FSDP has already summed the gradients of the layers over the members. This method sums the gradients of the
        unsharded parameters, and the squared norms of the gradient shards of the layers."""
        assert not taken, "a sharded policy has one shard per member"
        parameters = trained_parameters(self.model)
        layers, rest = ([p for p in parameters if isinstance(p, DTensor) == kind] for kind in (True, False))
        whole = [p.grad for p in rest if p.grad is not None]
        sum_gradients(whole, group, [])
        for gradient in (*whole, *(_local(p.grad) for p in layers if p.grad is not None)):
            gradient.div_(total)
        square = get_total_norm([_local(p.grad) for p in layers if p.grad is not None]).square()
        group.sum_(square)
        norm = (square + get_total_norm([p.grad for p in rest if p.grad is not None]).square()).sqrt()
        for part in (layers, rest):
            clip_grads_with_norm_(part, self.config.max_grad_norm, norm)
        return norm

    def logits(self, tokens: Tensor, autocast: bool = True) -> Tensor:
        """Return the logits [N, V] of one sequence [N], the same on every member. Raises GroupBroken."""
        try:
            return super().logits(tokens, autocast)
        except RuntimeError as error:
            raise broken(error) or error from None

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return whole tensors. Each is gathered when it is read, by all members in the same order."""
        return Gathered(self.model.state_dict(), partial(_whole, group=self.group))

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """Return whole tensors of Adam's state by name. Each is gathered when it is read, as in `state_dict`."""
        return Gathered(super().optimizer_state(), partial(_whole, group=self.group))

    def sha256(self) -> str:
        return weights.sha256(self._in_host_memory(self.model.state_dict()))

    def save(self, folder: Path) -> None:
        """Write the same files as an unsharded policy. Only the member with rank 0 writes."""
        policy = self._in_host_memory(self.model.state_dict(), first_alone=True)
        moments = self._in_host_memory(super().optimizer_state(), first_alone=True)
        if self.group.rank == 0:
            save_model(self.model, folder / "policy", policy)
            save_file(moments, folder / "optimizer.safetensors")

    def _in_host_memory(self, state: Mapping[str, Tensor], first_alone: bool = False) -> dict[str, Tensor]:
        """Return whole tensors, gathered in host memory. With `first_alone`, members except rank 0 return {}.

        Tensors that are on every member are not copied, so that tied tensors still share memory."""
        found = {}
        for name, tensor in state.items():
            whole = _whole(tensor, self.group).cpu() if isinstance(tensor, DTensor) else tensor
            if self.group.rank == 0 or not first_alone:
                found[name] = whole
        return found

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        super().load_optimizer_state({k: _shard_like(parameters[k.rpartition("/")[0]], v) for k, v in state.items()})


class Gathered(Mapping[str, Tensor]):
    """Mapping that applies `whole` to a tensor when it is read, so that one whole tensor exists at a time."""

    def __init__(self, state: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]) -> None:
        self._state, self._whole = state, whole

    def __getitem__(self, name: str) -> Tensor:
        return self._whole(self._state[name])

    def __contains__(self, name: object) -> bool:
        return name in self._state

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def shard_layers(model: Any, mesh: DeviceMesh) -> None:
    """Shard the parameters of a model's decoder layers over the members of the mesh, in place."""
    layers = checkpointable_layers(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
        layer.set_gradient_divide_factor(1.0)  # the sum over members, not the mean
        layer.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    own = {p for layer in layers for p in layer.parameters()}
    # the root has no shards, but FSDP needs it to overlap a layer's gather with the work of the layer before
    fully_shard(model.base_model, mesh=mesh, ignored_params={p for p in model.base_model.parameters() if p not in own})


def _whole(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the whole tensor. FSDP2 shards a tensor along its first dimension, so the shards are concatenated."""
    if not isinstance(tensor, DTensor):
        return tensor
    return group.gather(_local(tensor).reshape(-1)).view(tensor.shape)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_like(parameter: Tensor, moment: Tensor) -> Tensor:
    """Return this member's shard of a moment if its parameter is sharded. Adam's step count is not sharded."""
    if not isinstance(parameter, DTensor) or moment.dim() == 0:
        return moment
    place, cut = parameter.device_mesh, parameter.placements
    return distribute_tensor(moment.to(parameter.device), place, cut, src_data_rank=None)


def make_policy(config: Config, folder: str | Path | None = None) -> Policy:
    """Return the policy of a recipe, with weights from `folder` (default: the recipe's model). It is sharded if
    `train.shard` is set, and has adapters if `train.lora.rank` is set. Raises ModelError."""
    folder = folder or config.model.path
    kind = ShardedPolicy if config.train.shard else AdaptedPolicy if config.train.lora.rank else Policy
    dtype, device = torch_dtype(config.model), torch_device(config.model)
    return kind(folder, dtype, device, config.train, config.rollout, reference=config.model.path)
