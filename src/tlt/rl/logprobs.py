"""Log-probs and entropies of response tokens, and the log-probs that stay fixed during an update.

The LM head is applied to chunks of tokens to save memory.

Shapes: T response tokens of a micro-batch, D hidden size, V vocabulary. At V = 151,936 a float32 [T, V] tensor of 4,096
tokens takes 2.3 GiB. The log-softmax, its gradient and the entropy would need several such tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt.config import TrainConfig
from tlt.models.hugging_face import Head
from tlt.rl.batching import MicroBatch
from tlt.rl.groups import advantages_of
from tlt.rl.parallel import ProcessGroup
from tlt.sampling import lowest_temperature
from tlt.types import TrainBatch

LOGITS_MB = 256
"""Size in MiB of the logits that are computed at once in the update. A chunk is computed again for the gradient, and
needs about three times this memory."""


class Forward(Protocol):
    """Forward pass of a model, with gradients."""

    model: Any

    def hidden(self, micro: MicroBatch) -> Tensor:
        """Return the hidden states [T, D] that predict a micro-batch's targets."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [T, V] for hidden states [T, D]."""
        ...


class TransformersForward:
    """Forward pass by transformers' own code. If `autocast`, the model computes in bfloat16."""

    def __init__(self, model: Any, autocast: bool) -> None:
        self.model, self._head = model, Head(model)
        self._cast = _autocast(model.device, autocast)

    def hidden(self, micro: MicroBatch) -> Tensor:
        inputs = {"input_ids": micro.input_ids, "position_ids": micro.position_ids}
        several = micro.row.arguments(micro.input_ids) if micro.row else {}
        with self._cast:
            hidden = self.model.base_model(**inputs, **several, use_cache=False).last_hidden_state
        return micro.predicting(hidden[0])

    def logits(self, hidden: Tensor) -> Tensor:
        with self._cast:
            return self._head(hidden)


def token_logprobs(forward: Forward, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs [T] of a micro-batch's targets under softmax(logits / temperature), and the entropies [T] of
    these distributions. Entropies have no gradient. At most 256 MiB of logits are computed at once."""

    def logprobs_of(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = forward.logits(hidden)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return LogProbs.apply(wide, targets, max(temperature, lowest_temperature(wide.dtype)))

    return in_chunks(logprobs_of, forward.hidden(micro), micro.targets, chunk_tokens(forward.model))


class LogProbs(torch.autograd.Function):
    """Log-probs [n] of targets [n] under softmax(logits / temperature), and entropies [n] without gradient.

    The logits [n, V] are overwritten by the probabilities, and these by the gradient of the logits, because on a CPU
    the allocation of a tensor of this size takes a quarter of the time of the head's matrix product.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if temperature != 1.0:
            logits.div_(temperature)
        log_p = torch.log_softmax(logits, dim=-1)
        p = torch.exp(log_p, out=logits)
        ctx.save_for_backward(p, targets)
        ctx.temperature = temperature
        entropies = -torch.linalg.vecdot(p, log_p)
        ctx.mark_non_differentiable(entropies)
        return log_p.gather(-1, targets[:, None]).squeeze(-1), entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        p, targets = ctx.saved_tensors
        own = gradients[0][:, None] / ctx.temperature
        gradient = p.mul_(-own)
        # not scatter_add_, which has no deterministic kernel on CUDA
        return gradient.scatter_(-1, targets[:, None], gradient.gather(-1, targets[:, None]) + own), None, None


def sequence_logits(model: Any, tokens: Tensor, autocast: bool) -> Tensor:
    """Return the logits [N, V] at each token of one sequence [N], computed by the same code as in `token_logprobs`."""
    hidden = last_hidden(model, tokens, autocast)
    with _autocast(tokens.device, autocast):
        return Head(model)(hidden)


def last_hidden(model: Any, tokens: Tensor, autocast: bool) -> Tensor:
    """Return the hidden states [N, D] of one sequence [N] after the model's final norm."""
    positions = torch.arange(len(tokens), device=tokens.device)
    inputs = {"input_ids": tokens[None], "position_ids": positions[None]}
    with _autocast(tokens.device, autocast):
        return model.base_model(**inputs, use_cache=False).last_hidden_state[0]


def _autocast(device: torch.device, enabled: bool) -> torch.autocast:
    # no cache: each weight is used once, and a cache would keep bfloat16 copies of all layers in memory
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)


def chunk_tokens(model: Any) -> int:
    """Return the number of tokens whose logits are computed at once. It is at least 1."""
    width = 8 if model.dtype == torch.float64 else 4
    return max(1, LOGITS_MB * 2**20 // (model.config.vocab_size * width))


def in_chunks(function: Any, hidden: Tensor, targets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Apply `function(hidden [n, D], targets [n]) -> (logprobs [n], entropies [n])` to chunks of n = `tokens` tokens.

    If there are several chunks, only hidden states are saved for the backward pass, which recomputes each chunk.
    """
    if len(targets) <= tokens:
        return function(hidden, targets)
    parts = [
        checkpoint(function, h, t, use_reentrant=False, preserve_rng_state=False)
        for h, t in zip(hidden.split(tokens), targets.split(tokens), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def old_logprobs(batch: TrainBatch, micro: MicroBatch, logprobs: Tensor, known: Mapping[int, Tensor]) -> Tensor:
    """Return old log-probs [T] of a micro-batch: those in `known` (response index -> log-probs) where present, else
    `logprobs` of the current policy, detached."""
    present = logprobs.detach().split([batch.num_sampled(i) for i in micro.sequences])
    return torch.cat([known.get(i, now) for i, now in zip(micro.sequences, present, strict=True)])


def rollout_logprobs(batch: TrainBatch, micro: MicroBatch, like: Tensor) -> Tensor:
    return like.new_tensor([x for i in micro.sequences for x in batch.rollout_logprobs[i]])


class FixedLogprobs(NamedTuple):
    """Log-probs that stay fixed during an update: response index -> log-probs of its sampled tokens. Log-probs that are
    missing here are computed with each micro-batch."""

    old: dict[int, Tensor]
    """log-probs under the policy that decoded the response, computed by the trainer"""
    reference: dict[int, Tensor]
    """log-probs under the reference model: the model that training started from"""


def exchange(
    own: Mapping[int, Tensor], lengths: Mapping[int, int], group: ProcessGroup, like: Tensor
) -> dict[int, Tensor]:
    """Return the log-probs that all members of a group have computed, by response index and with the same bits on each
    member. `own`: response index -> log-probs that this member has computed. `lengths`: response index -> number of
    sampled tokens. `like`: a tensor with the dtype and device of the log-probs."""
    parts = [own[i] if i in own else like.new_zeros(length) for i, length in lengths.items()]
    whole = torch.cat([like.new_zeros(0), *parts])
    group.sum_(whole)  # one member has the log-prob, the other members have 0
    return dict(zip(lengths, whole.split([*lengths.values()]), strict=True))


def penalized(
    batch: TrainBatch, fixed: FixedLogprobs, kl: Callable[[Tensor, Tensor], Tensor], train: TrainConfig
) -> tuple[TrainBatch, float]:
    """Return the batch with a KL penalty, and the mean KL divergence per token. `kl` estimates the KL divergence at
    each token. The sum over a response, times train.kl_weight, is subtracted from the reward of the response.
    Advantages are computed from these rewards."""
    everyone = range(len(batch.response_ids))
    sums = [float(kl(fixed.old[i].double(), fixed.reference[i].double()).sum()) for i in everyone]
    left = iter(sums)
    rewards = [[reward - train.kl_weight * next(left) for reward in group] for group in batch.rewards]
    advantages = [advantage for group in advantages_of(rewards, train) for advantage in group]
    tokens = sum(map(batch.num_sampled, everyone))
    return replace(batch, rewards=rewards, advantages=advantages), sum(sums) / max(1, tokens)
