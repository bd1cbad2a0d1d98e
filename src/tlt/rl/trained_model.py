"""Model that is trained, with its optimizer: loading, saving, and one optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt.config import TrainConfig
from tlt.models import weights
from tlt.models.hugging_face import checkpoint_layers, load_model, save_model
from tlt.rl.finite import refuse_weights
from tlt.rl.parallel import Alone, Owners, ProcessGroup, sum_gradients


class TrainedModel:
    """Hugging Face model with AdamW. Master weights are float32, or float64 if `dtype` is float64. If `dtype` is
    bfloat16, passes run under autocast.

    Memory per parameter: master weight, gradient and Adam's two moments, 4 x 4 bytes in float32.
    """

    fused = True  # whether AdamW uses torch's fused kernels
    home: torch.device | None = None  # device that models are loaded to (default: `device`)

    def __init__(
        self, folder: str | Path, dtype: torch.dtype, device: torch.device, config: TrainConfig, base: str | Path
    ) -> None:
        """Load the weights in `folder`. `base`: path of the model that training started from."""
        self.config, self.device, self.base = config, device, base
        self.autocast = dtype == torch.bfloat16
        self.model = self._load(folder, torch.float32 if self.autocast else dtype)
        if config.gradient_checkpointing:
            checkpoint_layers(self.model)
        self.optimizer = self._make_optimizer()
        refuse_weights(self.own_weights(), Alone(), f"in {folder}", "fetch or save the model again")
        self.version: int | None = 0
        """Number of training steps that the weights have had. None during an update once a weight has changed."""

    def _load(self, folder: str | Path, dtype: torch.dtype) -> Any:
        return load_model(folder, dtype, self.home or self.device)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        trained, config = trained_parameters(self.model), self.config
        decays = {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay}
        stays = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}  # norms and biases
        return torch.optim.AdamW(
            [group for group in (decays, stays) if group["params"]],
            lr=config.learning_rate,
            betas=(0.9, config.adam_beta2),
            fused=self.fused,
        )

    def own_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the weights by name. A sharded policy returns only this member's part of each weight."""
        return self.model.named_parameters()

    # -- one optimizer step --------------------------------------------------------------------------------------------

    def apply_gradients(
        self, group: ProcessGroup, shards: Sequence[list[Tensor] | None], owners: Owners, total: int
    ) -> float:
        """Take an optimizer step with the sum of all shards' gradients, divided by `total` and clipped. Return the norm
        before clipping. If the norm is not finite, change no weight.

        `shards`: gradients of each of this member's shards; None if the parameters hold them."""
        parameters = trained_parameters(self.model)
        for parameter in parameters:
            if parameter.grad is None:  # no response was computed; Adam's moments and weight decay still apply
                parameter.grad = torch.zeros_like(parameter)
        own = [shard or [p.grad for p in parameters if p.grad is not None] for shard in shards]
        norm = self._clip(group, own, owners, total)
        if norm.isfinite():  # else the optimizer step would make weights NaN
            self.version = None
            self.optimizer.step()
            torch.autograd.graph.increment_version(parameters)  # a fused step does not, and `EngineForward` needs it
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _clip(self, group: ProcessGroup, shards: Sequence[Sequence[Tensor]], owners: Owners, total: int) -> Tensor:
        """Sum the shards' gradients, divide them by `total` and clip their norm. Return the norm before clipping."""
        parameters = trained_parameters(self.model)
        gradients = [p.grad for p in parameters if p.grad is not None]
        sum_gradients(gradients, group, shards, owners)
        for gradient in gradients:
            gradient.div_(total)
        return torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def trained_state(self) -> Mapping[str, Tensor]:
        """Return the tensors that training changes, by name. `load_state_dict` accepts them."""
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    def sha256(self) -> str:
        return weights.sha256(self.state_dict())

    def save(self, folder: Path) -> None:
        """Write `policy/`, which transformers can load, and the optimizer's state as safetensors."""
        self._save_model(folder / "policy")
        save_file(dict(self.optimizer_state()), folder / "optimizer.safetensors")

    def _save_model(self, folder: Path) -> None:
        save_model(self.model, folder)

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """Return Adam's state by name "parameter/moment". It is empty before the first update."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        return {
            f"{names[id(p)]}/{key}": value.detach().contiguous()
            for p, moments in self.optimizer.state.items()
            for key, value in moments.items()
        }

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace Adam's state by copies of `state` on the devices of the parameters."""
        parameters = dict(self.model.named_parameters())
        steps = self.device if self.fused else torch.device("cpu")
        self.optimizer.state.clear()
        for key, value in state.items():
            name, _, moment = key.rpartition("/")
            place = steps if moment == "step" else parameters[name].device
            self.optimizer.state[parameters[name]][moment] = value.to(place, copy=True)

    def load_optimizer(self, folder: Path) -> None:
        self.load_optimizer_state(load_file(folder / "optimizer.safetensors"))


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
