"""AdamW: what of a model decays, and its moments by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tlt.config import TrainConfig


def adamw(model: torch.nn.Module, config: TrainConfig, fused: bool) -> torch.optim.AdamW:
    """`fused`: in one pass over each tensor."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decays = {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay}
    stays = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}  # norms and biases
    return torch.optim.AdamW(
        [group for group in (decays, stays) if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        fused=fused,
    )


def moments_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Tensor]:
    """name of the parameter + name of the moment -> tensor; empty before the first update."""
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        f"{names[id(p)]}/{key}": value.detach().contiguous()
        for p, moments in optimizer.state.items()
        for key, value in moments.items()
    }


def load_moments(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, state: Mapping[str, Tensor], steps: torch.device
) -> None:
    """`steps`: where the count of steps lies; the moments lie beside their parameters."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in state.items():
        name, _, moment = key.rpartition("/")
        place = steps if moment == "step" else parameters[name].device
        optimizer.state[parameters[name]][moment] = value.to(place, copy=True)
