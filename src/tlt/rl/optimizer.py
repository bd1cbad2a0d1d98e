"""AdamW optimizer: its parameter groups, and its moments by parameter name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tlt.config import TrainConfig


def adamw(model: torch.nn.Module, config: TrainConfig, fused: bool) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters. Norms and biases have no weight decay. `fused`: whether to use
    torch's fused kernels."""
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
    """Return Adam's moments and step counts by name "parameter/moment". The dict is empty before the first update."""
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        f"{names[id(p)]}/{key}": value.detach().contiguous()
        for p, moments in optimizer.state.items()
        for key, value in moments.items()
    }


def load_moments(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, state: Mapping[str, Tensor], steps: torch.device
) -> None:
    """Replace Adam's moments by copies of `state` on the devices of the parameters. `steps`: device of Adam's step
    counts."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in state.items():
        name, _, moment = key.rpartition("/")
        place = steps if moment == "step" else parameters[name].device
        optimizer.state[parameters[name]][moment] = value.to(place, copy=True)
