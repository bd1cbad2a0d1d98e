"""Muon for the matrices of the layers, AdamW for the embedding and the norms.

Muon (Keller Jordan, 2024) replaces the momentum of a matrix by the nearest matrix with equal singular values. A model
this small needs about half the tokens with it, for a few percent of the time of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

# Newton-Schulz iteration of the fifth order: coefficients of the reference implementation.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(stack: Tensor, rounds: int = 5) -> Tensor:
    """Each matrix of a stack with its singular values all moved near 1."""
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if tall else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    """Both optimizers behind one `step`; `scale` runs from 0 to 1 and back with the schedule."""

    def __init__(self, model: Qwen3ForCausalLM, muon_rate: float, adam_rate: float) -> None:
        inner = [p for p in model.model.layers.parameters() if p.dim() == 2]
        chosen = {id(p) for p in inner}
        self.stacks: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in inner:
            self.stacks.setdefault(parameter.shape, []).append(parameter)
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self.stacks.items()}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        self.adam = torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.muon_rate, self.adam_rate = muon_rate, adam_rate

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update from the gradients that stand in the model, which are cleared."""
        for shape, group in self.stacks.items():
            gradient = torch.stack([p.grad for p in group])
            momentum = self.momenta[shape].lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95))
            rate = self.muon_rate * scale * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - 0.1 * self.muon_rate * scale).sub_(rate * change)
                parameter.grad = None
        for options in self.adam.param_groups:
            options["lr"] = self.adam_rate * scale
        self.adam.step()
        self.adam.zero_grad()
