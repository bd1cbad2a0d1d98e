"""Check before the first step whether the largest micro-batch of an update fits the memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from tlt.config import Config, ConfigError
from tlt.engine.memory import free_bytes
from tlt.models.hugging_face import checkpointable_layers
from tlt.rl.logprobs import LOGITS_MB, FixedLogprobs, last_hidden
from tlt.rl.measure import TokenMetrics
from tlt.rl.parallel import Alone
from tlt.rl.policy import Policy, ShardSum, Update, trained_parameters
from tlt.types import TrainBatch

_SHORT = 32  # tokens of the shorter of the two passes whose memory is measured
_LOGITS = 3  # memory to compute the gradient of a chunk of tokens, in multiples of the chunk's logits


class Need(NamedTuple):
    """Memory in bytes that an update needs in addition to the memory in use."""

    optimizer: int
    """gradients, Adam's moments and copies of both"""
    activations: float
    """tensors of a micro-batch that the forward pass saves for the backward pass"""
    logits: float
    """logits of a chunk of tokens and their gradient"""

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in self._asdict().items())
        return f"{sum(self) / 2**30:.2f} GiB ({parts})"


def dry_run(policy: Policy, config: Config, longest_prompt: int) -> float:
    """Raise ConfigError, which names the fields to change, if an update does not fit the memory. Return the bytes that
    it needs in addition to the memory in use. On a CUDA device these are without Adam's moments.

    `longest_prompt` is in tokens. On a CUDA device the gradient of the largest micro-batch is computed and dropped. On
    a CPU the needed memory is only estimated, because the system would kill a process that runs out of memory. No
    weight and no random state changes."""
    need, free = memory_needed(policy, config, longest_prompt), _free(policy.device, config)
    if (bytes_ := _measured(policy, config, longest_prompt) if policy.device.type == "cuda" else sum(need)) <= free:
        return bytes_
    workers, (_, tokens) = config.cluster.workers, _tokens(config, longest_prompt)
    share = f" for each of {workers} workers" if workers > 1 else ""
    raise ConfigError(
        f"an update does not fit the memory of {policy.device}: with {tokens:,} tokens in a "
        f"micro-batch it needs about {need}, and {free / 2**30:.2f} GiB are free{share}: for activations lower "
        "train.micro_batch_tokens or rollout.max_new_tokens, or set train.gradient_checkpointing = true; for the "
        "optimizer set train.lora.rank or use a smaller model"
    )


def memory_needed(policy: Policy, config: Config, longest_prompt: int) -> Need:
    """Estimate the memory of an update from two short forward passes."""
    model, train, (_, tokens) = policy.model, config.train, _tokens(config, longest_prompt)
    width = 8 if model.dtype == torch.float64 else 4
    with _without_checkpoints(model):
        once, twice = (_saved_bytes(policy, times * _SHORT) for times in (1, 2))
    # a pass saves some bytes whatever its length: copies of experts' weights with LoRA adapters
    activations = max(0, 2 * once - twice) + (twice - once) / _SHORT * tokens
    if train.gradient_checkpointing:
        layers = max(1, len(checkpointable_layers(model)))
        activations = activations / layers + layers * model.config.hidden_size * width * tokens
    logits = min(tokens * model.config.vocab_size * width, LOGITS_MB * 2**20)
    return Need(_copies(policy, config) * own_bytes(trained_parameters(policy.model)), activations, _LOGITS * logits)


def _tokens(config: Config, longest_prompt: int) -> tuple[int, int]:
    """Return the largest numbers of tokens in a sequence and in a micro-batch. A sequence that exceeds
    train.micro_batch_tokens has its own micro-batch, and a shard may have fewer tokens than that."""
    rollout, train = config.rollout, config.train
    longest = longest_prompt + rollout.max_new_tokens
    responses = -(-rollout.prompts_per_step * rollout.group_size // train.updates_per_step)
    return longest, max(min(train.micro_batch_tokens, responses * longest), longest)


def _copies(policy: Policy, config: Config) -> int:
    """Return the memory for gradients, Adam's two moments and copies, in multiples of the size of the trained weights.

    With several workers on CPUs, each worker also keeps a copy of weights and moments from before the update, in case a
    worker fails."""
    keeps = policy.device.type == "cpu" and config.cluster.workers > 1 and not config.train.shard
    return 6 if keeps else 3


def own_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the size of parameters in bytes. If they are sharded, only this member's shards count."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parameters)


def _free(device: torch.device, config: Config) -> float:
    """Return the number of free bytes of memory for one worker. Workers on the CPUs of one machine share its memory."""
    alone = device.type == "cpu" and config.cluster.address is None
    return free_bytes(device) / (config.cluster.workers if alone else 1)


def _saved_bytes(policy: Policy, tokens: int) -> int:
    """Return the bytes, except weights, that a forward pass over `tokens` tokens saves for the backward pass."""
    found = dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
        return tensor

    ids = torch.arange(tokens, device=policy.device) % policy.model.config.vocab_size
    with saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = last_hidden(policy.model, ids, policy.autocast)
    weights = {parameter.untyped_storage()._cdata for parameter in policy.model.parameters()}
    total = sum(size for storage, size in found.items() if storage not in weights)
    del hidden  # `hidden` kept all saved tensors alive until here, so that no two storages had the same address
    return total


def _measured(policy: Policy, config: Config, longest_prompt: int) -> float:
    """Allocate Adam's moments, and compute the gradient of the largest micro-batch. Return the bytes of the gradient
    and its computation, or infinity if the memory does not suffice."""
    packer, (longest, tokens) = policy.passes.packer, _tokens(config, longest_prompt)
    tokens = tokens if packer.shares else longest
    count = -(-tokens // longest)
    length = tokens // count
    new = min(config.rollout.max_new_tokens, length - 1)
    batch = TrainBatch([(0,) * (length - new)] * count, [[0] * new] * count, [1.0] * count, [[0.0] * new] * count)
    micro = packer.pack(batch, [[i] for i in range(count)])
    fixed = FixedLogprobs({}, {i: torch.zeros(new, device=policy.device) for i in range(count)})
    update = Update(policy, policy.passes, batch, 0, Alone())
    try:
        moments = torch.empty(2 * own_bytes(trained_parameters(policy.model)), dtype=torch.uint8, device=policy.device)
        before = torch.cuda.memory_allocated()
        if policy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        update.add_gradient(micro, fixed, ShardSum(), TokenMetrics(policy.device))
        del moments
        return torch.cuda.max_memory_allocated() - before
    except torch.OutOfMemoryError:
        return math.inf
    finally:
        policy.optimizer.zero_grad(set_to_none=True)
        if policy.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _without_checkpoints(model: Any) -> Iterator[None]:
    """Turn gradient checkpointing off in the `with` block, because tensors that the backward pass recomputes cannot be
    measured."""
    before = [(layer, layer.training) for layer in checkpointable_layers(model)]
    for layer, _ in before:
        layer.training = False
    try:
        yield
    finally:
        for layer, training in before:
            layer.training = training
