"""Output head of a transformers causal language model, run by the model's own code: from hidden states to logits, with
the model's scalings and soft caps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

_LINEAR = 1e-4  # tolerance relative to the largest logit, up to which logits count as proportional


class Head:
    """Function from hidden states after the final norm to logits, by the model's own code. It shares the model's
    weights, so it follows their changes."""

    def __init__(self, model: Any) -> None:
        self._model = copy.copy(model)
        self._model._modules = model._modules | {model.base_model_prefix: _Given()}

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] for hidden states [..., D]."""
        logits = self._model(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1]), use_cache=False).logits
        return logits.view(*hidden.shape[:-1], logits.shape[-1])

    @torch.no_grad()
    def scaled(self, weight: Tensor) -> Tensor:
        """Return the head's weight [V, D], scaled so that hidden @ weight.T equals the logits. Drafters compute their
        logits with this weight alone.

        If logits are not proportional to hidden @ weight.T, for example because of a soft cap, the weight is returned
        unchanged. The learned drafter is then less accurate."""
        hidden = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device)[None]
        plain, own = (hidden @ weight.t()).double(), self(hidden).double()
        factor = round(float((plain * own).sum() / plain.square().sum()), 5)
        proportional = (own - factor * plain).abs().max() <= _LINEAR * own.abs().max()
        return weight * factor if proportional and factor != 1.0 else weight


class _Given(nn.Module):
    """Stand-in for a base model, which returns the hidden states that it receives."""

    @property
    def decoder(self) -> _Given:
        """The stand-in itself, for families whose base model has its layers in `decoder`."""
        return self

    def forward(self, input_ids: None = None, *, inputs_embeds: Tensor, **_: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """Output of the stand-in. It has only hidden states, because a head reads nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]
