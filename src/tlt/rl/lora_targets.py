"""Weights that LoRA trains: from the names in `train.lora.targets` to PEFT's adapters in a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tlt.config.sections import LoraConfig
from tlt.models.hugging_face import is_named, names_of_ends
from tlt.models.model_folder import ModelError
from tlt_rl import install_hint

_ALL = "all-linear"
_TAKEN = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""names that PEFT takes for those of experts in transformers 4, if the model is a mixture of experts; it then passes
over a linear layer of this name, such as that of a shared expert"""


@dataclass(frozen=True)
class Targets:
    """Layers of a model that get adapters, by name. A tensor with the weights of all experts counts as a layer."""

    config: LoraConfig
    modules: list[str]
    """ends of names for PEFT's `target_modules`"""
    parameters: list[str]
    """ends of names for PEFT's `target_parameters`"""
    trained: list[str]
    frozen: list[str]
    """linear layers without an adapter; the head, embeddings and routers are not counted"""

    def peft_config(self) -> Any:
        return import_peft().LoraConfig(
            r=self.config.rank,
            lora_alpha=2 * self.config.rank,
            target_modules=self.modules,
            target_parameters=self.parameters or None,
            task_type="CAUSAL_LM",
        )

    def sentence(self, model: Any) -> str:
        """Return a log line that says what the adapters in `model` train."""
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        percent = 100 * adapters / (sum(p.numel() for p in model.parameters()) - adapters)
        others = f"; not on {', '.join(_kinds(self.frozen))}" if self.frozen else ""
        return (
            f"LoRA (train.lora.targets = {', '.join(self.config.targets)}) on {len(self.trained)} of "
            f"{len(self.trained) + len(self.frozen)} linear layers, {percent:.2g} % of the weights: "
            f"{', '.join(_kinds(self.trained))}{others}"
        )


def add_adapters(model: Any, config: LoraConfig) -> Targets:
    """Add adapters to the layers that `train.lora.targets` names, and freeze all other parameters. A fixed seed gives
    all processes the same adapters. New adapters do not change the model's output. Raises ModelError."""
    if config.rank > (most := model.config.hidden_size):
        raise ModelError(f"train.lora.rank = {config.rank} is above the model's hidden_size of {most}: lower it")
    targets = _find(model, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            import_peft().inject_adapter_in_model(targets.peft_config(), model)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"PEFT cannot adapt train.lora.targets ({reason}): name other layers") from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    adapted, wanted = [name for name, _ in adapted_weights(model)], targets.trained
    if odd := {name.removesuffix(".weight") for name in adapted} ^ {name.removesuffix(".weight") for name in wanted}:
        raise ModelError(f"PEFT does not adapt {min(odd)} as train.lora.targets asks: name other layers")
    return targets


def adapted_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) for each weight that has an adapter. The name is that in the model without adapters."""
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):  # one for `target_parameters` has the name of the parameter that it changes
            yield f"{without_adapters(name)}.{getattr(layer, 'parameter_name', 'weight')}", layer


def without_adapters(name: str) -> str:
    """Return the name that a parameter or layer has in the model without adapters."""
    return name.replace(".base_layer", "")


def _find(model: Any, config: LoraConfig) -> Targets:
    linear, experts = _layers(model)
    ends, known = names_of_ends(model), _kinds([*linear, *experts])
    targets = dict.fromkeys(name for target in config.targets for name in (known if target == _ALL else [target]))
    is_mixture = any("expert" in field for field in model.config.to_dict())
    modules, parameters = list[str](), list[str]()
    for target in targets:
        is_layer, is_tensor = (any(is_named(x, target) for x in names) for names in ([*linear, *ends], experts))
        if not (is_layer or is_tensor):
            raise ModelError(
                f"train.lora.targets has {target}, but the model has no linear layer of this name: name some of "
                f"{', '.join(known)}, or {_ALL}"
            )
        if is_layer and is_mixture and target.rpartition(".")[2] in _TAKEN:
            parameters.append(f"{target}.weight")
        elif is_layer:
            modules.append(target)
        if is_tensor:
            parameters.append(target)
    trained = [x for x in [*linear, *experts, *ends] if any(is_named(x, target) for target in targets)]
    return Targets(config, modules, parameters, trained, [x for x in [*linear, *experts] if x not in trained])


def _layers(model: Any) -> tuple[list[str], list[str]]:
    """Return the names of linear layers except the head, and of tensors with the weights of all experts."""
    linear, experts, head = list[str](), list[str](), model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            linear += [name] * (module is not head)
        elif not hasattr(module, "kernel_size"):  # the weight of a convolution has three dimensions too
            tensors = module.named_parameters(name, recurse=False)
            experts += [name for name, tensor in tensors if tensor.dim() == 3]
    return linear, experts


def _kinds(names: Iterable[str]) -> list[str]:
    """Return the ends of names that layers of the same kind share, such as `q_proj` and `experts.down_proj`."""

    def kind(name: str) -> str:
        *_, within, last = ["", *name.split(".")]
        return f"{within}.{last}" if within == "experts" or last == "weight" or last.isdigit() else last

    return list(dict.fromkeys(map(kind, names)))


def import_peft() -> Any:
    """Return the package `peft`. Raises ModelError if it is not installed."""
    try:
        import peft
    except ImportError:
        raise ModelError(f"train.lora needs PEFT: {install_hint('lora')}") from None
    return peft
