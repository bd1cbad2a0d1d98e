"""Check before the first step whether the largest micro-batch of an update fits the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from tlt.config import Config, ConfigError
from tlt.engine.memory import free_bytes
from tlt.models.hugging_face import checkpointable_layers
from tlt.rl.early import most_early_gradients, most_responses
from tlt.rl.logprobs import last_hidden
from tlt.rl.policy import Policy
from tlt.rl.shards import Shard
from tlt.types import TrainBatch

_SHORT = 32  # tokens of the shorter of the two passes whose memory is measured
_LOGITS = 3  # memory to compute the gradient of a chunk of tokens, in multiples of the chunk's logits
_LEAST_LOGITS = 32  # lowest train.logits_mb that is suggested, in MiB
_WRONG = 0.8  # if a GPU ran out of memory, suggested settings need at most this share of the failed settings' estimate


def dry_run(policy: Policy, config: Config, longest_prompt: int) -> None:
    """Raise ConfigError, which names the field to change, if an update does not fit the memory.

    `longest_prompt` is in tokens. On a CUDA device the gradient of the largest micro-batch is computed and dropped. On
    a CPU the needed memory is only estimated, from two short forward passes, because the system would kill a process
    that runs out of memory. No weight and no random state changes."""
    asked = _Update.of(config, longest_prompt)
    need = _Need.measured(policy, config)
    free = _free(policy.device, config)
    tries = policy.device.type == "cuda"
    if _has_room(policy, need, asked) if tries else need.of(asked) <= free:
        return
    most = min(free, _WRONG * need.of(asked)) if tries else free
    fitting = next((one for one in asked.smaller() if need.of(one) <= most), None)
    remedy = f"set {fitting.changes(asked)}" if fitting else "set train.lora.rank, use a smaller model, or add memory"
    workers = config.cluster.workers
    share = f" for each of {workers} workers" if workers > 1 else ""
    raise ConfigError(
        f"an update does not fit the memory of {policy.device}: with {asked.tokens:,} tokens in a micro-batch it needs "
        f"about {need.of(asked) / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free{share}: {remedy}"
    )


@dataclass(frozen=True)
class _Update:
    """Settings of an update that determine how much memory it needs."""

    prompt: int
    """number of tokens of the longest prompt"""
    new: int
    """largest number of tokens in a response: `rollout.max_new_tokens`"""
    budget: int
    """largest number of tokens in a micro-batch: `train.micro_batch_tokens`, or fewer if no shard has that many
    tokens"""
    logits_mb: int
    checkpoints: bool
    """whether gradient checkpointing is on: `train.gradient_checkpointing`"""

    @staticmethod
    def of(config: Config, longest_prompt: int) -> _Update:
        rollout, train = config.rollout, config.train
        most = most_responses(config) * (longest_prompt + rollout.max_new_tokens)
        budget = min(train.micro_batch_tokens, most)
        return _Update(longest_prompt, rollout.max_new_tokens, budget, train.logits_mb, train.gradient_checkpointing)

    @property
    def longest(self) -> int:
        return self.prompt + self.new

    @property
    def tokens(self) -> int:
        """Number of tokens of the largest micro-batch. A sequence that exceeds the budget has its own micro-batch."""
        return max(self.budget, self.longest)

    def smaller(self) -> Iterator[_Update]:
        """Yield settings that need less memory. Settings that change the run least come first."""
        last = self
        for change in ({}, {"checkpoints": True}, {"logits_mb": min(self.logits_mb, _LEAST_LOGITS)}):
            last = replace(last, **change)
            for budget in (*_halves(self.budget, self.longest), min(self.budget, self.longest)):
                yield replace(last, budget=budget)
        for new in _halves(self.new // 2, 0):
            yield replace(last, budget=min(self.budget, self.prompt + new), new=new)

    def changes(self, before: _Update) -> str:
        """Return the recipe fields that differ from `before`, as text such as `train.logits_mb = 32`."""
        fields = {
            "train.micro_batch_tokens": (self.budget, before.budget),
            "train.gradient_checkpointing": (str(self.checkpoints).lower(), str(before.checkpoints).lower()),
            "train.logits_mb": (self.logits_mb, before.logits_mb),
            "rollout.max_new_tokens": (self.new, before.new),
        }
        return ", ".join(f"{name} = {now}" for name, (now, then) in fields.items() if now != then)


def _halves(first: int, least: int) -> Iterator[int]:
    while first > least:
        yield first
        first //= 2


@dataclass(frozen=True)
class _Need:
    """Memory in bytes that an update needs in addition to the memory in use."""

    fixed: int
    """bytes of gradients, Adam's moments and copies of the state, whatever the number of tokens"""
    saved: float
    """bytes per token that a forward pass saves for the backward pass, without gradient checkpointing"""
    merged: float
    """bytes that it saves whatever the number of tokens: copies of experts' weights with LoRA adapters"""
    logits: int
    """bytes of the logits of one token"""
    layers: int
    hidden: int
    """bytes of the hidden state of one token between two layers"""

    @staticmethod
    def measured(policy: Policy, config: Config) -> _Need:
        model = policy.model
        width = 8 if model.dtype == torch.float64 else 4
        with _without_checkpoints(model):
            once, twice = (_saved_bytes(policy, times * _SHORT) for times in (1, 2))
        return _Need(
            fixed=_copies(policy, config) * _trained_bytes(policy),
            saved=(twice - once) / _SHORT,
            merged=max(0, 2 * once - twice),
            logits=model.config.vocab_size * width,
            layers=max(1, len(checkpointable_layers(model))),
            hidden=model.config.hidden_size * width,
        )

    def of(self, update: _Update) -> float:
        saved = self.merged + self.saved * update.tokens
        if update.checkpoints:
            saved = saved / self.layers + self.layers * self.hidden * update.tokens
        logits = min(update.tokens * self.logits, update.logits_mb * 2**20)
        return self.fixed + saved + _LOGITS * logits


def _copies(policy: Policy, config: Config) -> int:
    """Return the memory for gradients, Adam's two moments and copies, in multiples of the size of the trained weights.

    With several workers on CPUs, each worker also keeps a copy of weights and moments from before the update, in case a
    worker fails. It keeps one more gradient for each of its early shards (`rl/early.py`)."""
    keeps = policy.device.type == "cpu" and config.cluster.workers > 1 and not config.train.shard
    return 6 + most_early_gradients(config) if keeps else 3


def _trained_bytes(policy: Policy) -> int:
    """Return the size in bytes of the trained parameters. For a sharded policy, only this member's shards count."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
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
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(tokens, device=policy.device) % policy.model.config.vocab_size
    with saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = last_hidden(policy.model, ids, policy.autocast)
    weights = {parameter.data_ptr() for parameter in policy.model.parameters()}
    total = sum(size for place, size in found.items() if place not in weights)
    del hidden  # `hidden` kept all saved tensors alive until here, so that no two had the same address
    return total


def _has_room(policy: Policy, need: _Need, update: _Update) -> bool:
    """Allocate Adam's moments, and compute the gradient of the largest micro-batch. Return whether both fit the
    memory."""
    packer = policy.passes.packer
    budget = update.budget if packer.shares else 0
    count = max(1, -(-budget // update.longest))
    length = max(budget // count, update.longest if count == 1 else 0)
    new = min(update.new, length - 1)
    batch = TrainBatch([(0,) * (length - new)] * count, [[0] * new] * count, [1.0] * count, [[0.0] * new] * count)
    micro = packer.pack(batch, [[i] for i in range(count)])
    gradients = policy.gradients
    try:
        moments = torch.empty(2 * need.fixed // 3, dtype=torch.uint8, device=policy.device)
        gradients.add(gradients.begin(Shard(0, batch, list(range(count)))), micro)
        del moments
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        gradients.forget()
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
