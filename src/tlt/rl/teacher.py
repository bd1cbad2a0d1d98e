"""Policy as the teacher in drafter training, for engines that do not return hidden states (vLLM)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from tlt.config import Config
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import FeatureLayout
from tlt.engine.protocol import Target
from tlt.models.decoder import Decoder, rotary_table
from tlt.models.head import Head
from tlt.rl.logprobs import last_hidden
from tlt.rl.policy import Policy
from tlt.spot.recompute import Recompute
from tlt.spot.spot import SpotTrainer
from tlt.spot.trainer import Interrupted


def spot_trainer(
    layer: EagleLayer, target: Target, policy: Policy | None, config: Config, worker: int = 0
) -> SpotTrainer:
    """Return the drafter's trainer. Its teacher is the target if that is tlt's own decoder, else the policy. `worker`
    is the index of the worker. It is added to the seed."""
    training, seed = config.speculation.training, config.run.seed + worker
    if isinstance(target, Decoder):
        return SpotTrainer(layer, target, training, seed)
    assert policy, "only our own decoder returns hidden states"
    teacher = PolicyTeacher(policy, target)
    recompute = Recompute(teacher, layer.options.layout, training.buffer_tokens)
    return SpotTrainer(layer, teacher, training, seed, recompute)


class PolicyTeacher:
    """Teacher that computes hidden states with the policy. Between updates, the policy has the same weights as the
    target.

    A sharded policy cannot be a teacher, because all its members must take part in each pass."""

    def __init__(self, policy: Policy, target: Target) -> None:
        self.policy, self.target = policy, target
        self.options, self.dtype, self.device = target.options, target.dtype, target.device
        self._table = rotary_table(self.options, self.dtype, self.device)
        self._head: tuple[int, Tensor] | None = None

    @property
    def version(self) -> int:
        return self.target.version

    @property
    def embedding(self) -> Tensor:
        return self.policy.model.get_input_embeddings().weight.detach()

    @property
    def head(self) -> Tensor:
        """Copy of the LM head's weight. It is a copy, because the next update changes the policy in place."""
        if self._head is None or self._head[0] != self.version:
            model = self.policy.model
            weight = Head(model).scaled(model.get_output_embeddings().weight.detach())
            self._head = self.version, weight.to(self.dtype, copy=True)
        return self._head[1]

    def cis(self, positions: Tensor) -> Tensor:
        return self._table[positions]

    @torch.no_grad()
    def features(self, tokens: Tensor, layout: FeatureLayout, stop: Callable[[], bool]) -> Tensor:
        """Return the drafter's input features [N, F] of a sequence [N]: hidden states of the layers in `layout`. If
        `stop` returns True, raise Interrupted before the next layer."""
        model, entered = self.policy.model, dict[int, Tensor]()

        def save_input(index: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if stop():
                raise Interrupted
            if index in layout.taps:
                entered[index] = (arguments[0] if arguments else named["hidden_states"])[0]

        with ExitStack() as hooks:
            for index, layer in enumerate(model.base_model.layers):
                hook = layer.register_forward_pre_hook(
                    lambda _, arguments, named, index=index: save_input(index, arguments, named), with_kwargs=True
                )
                hooks.callback(hook.remove)
            last = last_hidden(model, tokens.to(self.device), self.policy.autocast)
        return torch.cat([*(entered[tap] for tap in layout.taps), last], dim=-1).to(self.dtype)
