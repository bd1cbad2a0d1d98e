"""The policy that TRL trains, as whole tensors with their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm

from tlt.integrations import UnsupportedError
from tlt.rl.lora import merged_state
from tlt.rl.sharded import Gathered

_MERGED = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout", "bias", "init_lora_weights"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "ensure_weight_tying", "task_type", "base_model_name_or_path", "revision", "inference_mode"),
    *("auto_mapping", "corda_config", "eva_config", "lora_ga_config"),
}
"""options of PEFT's LoRA with which `merged_state` is the model with adapters, or that do not change the model"""


class Trained:
    """Policy of a TRL trainer: plain, replicated by DDP, sharded by FSDP2, or with LoRA adapters, which are merged into
    copies of the weights. All processes must call its methods together, because they may gather shards."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._known: tuple[int, list[float]] | None = None
        self.dtype = torch.bfloat16 if trainer.args.bf16 else self.model.dtype
        if self._has_adapters:
            self._refuse_adapters()

    @property
    def model(self) -> Any:
        wrapped = self.trainer.model_wrapped
        return self.trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)

    @property
    def _has_adapters(self) -> bool:
        return hasattr(self.model, "peft_config")

    def _refuse_adapters(self) -> None:
        for name, peft in self.model.peft_config.items():
            kind = str(getattr(peft.peft_type, "value", peft.peft_type))
            usual, options = type(peft)(), {field.name for field in fields(peft)} - _MERGED
            changed = sorted(what for what in options if getattr(peft, what) != getattr(usual, what))
            if beyond := changed if kind == "LORA" else [kind]:
                raise UnsupportedError(
                    f"tlt in TRL does not support the adapter {name!r} with {beyond[0]}: use plain LoRA"
                )
        if any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            raise UnsupportedError("tlt in TRL does not support LoRA adapters sharded by FSDP2: train with DDP")

    def has_changed(self) -> bool:
        """Return whether the global step or a weight has changed since the last call. Weights are compared by the norm
        of each parameter in float64, because fused AdamW does not change a parameter's version counter."""
        with torch.no_grad():
            norms = [_whole(vector_norm(parameter, dtype=torch.float64)) for parameter in self.model.parameters()]
        now = self.trainer.state.global_step, torch.stack(norms).tolist()
        before, self._known = self._known, now
        return now != before

    def state_dict(self) -> Mapping[str, Tensor]:
        if self._has_adapters:
            return merged_state(self.model.get_base_model())
        return Gathered(self.model.state_dict(), _whole)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [N, V] at each token of one sequence [N]."""
        with _without_dropout(self.model), self.trainer.accelerator.autocast():
            return self.model(input_ids=tokens[None].to(self.trainer.accelerator.device), use_cache=False).logits[0]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _without_dropout(model: Any) -> Iterator[None]:
    """Switch dropout off for the `with` block. Modules are restored one by one, because `model.train()` would also
    switch on modules that the user switched off."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
