"""LoRA: the weights that train.lora.targets names, a policy that trains PEFT adapters of them, and their merge into the
weights of the base model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tlt.config.sections import LoraConfig
from tlt.files import read_json
from tlt.models.hugging_face import is_named, is_tied, load_model, names_of_ends
from tlt.models.model_folder import ModelError
from tlt.models.weights import folder_sha256
from tlt.rl.policy import Policy
from tlt_rl import install_hint

log = logging.getLogger(__name__)

_ALL = "all-linear"
_TAKEN = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""names that PEFT takes for those of experts in transformers 4, if the model is a mixture of experts; it then passes
over a linear layer of this name, such as that of a shared expert"""
FILE = "adapter_model.safetensors"
_PEFT = "base_model.model."  # prefix of each name in PEFT's files
_ADAPTER = "default"
_TOKENS = 16  # length in tokens of the text on which merged and adapted model are compared
_ROUNDING = 1e-3  # largest total variation between merged and adapted model that float32 rounding explains


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


class AdaptedPolicy(Policy):
    """Policy that trains only LoRA adapters. Its checkpoints hold only the adapters, in PEFT's own format.

    `state_dict` returns the merged model, which equals the adapted one up to rounding."""

    def _load(self, folder: str | Path, dtype: torch.dtype) -> Any:
        """Return the model in `self.base` with the adapters in `folder`, or with new adapters if `folder` has none."""
        model = load_model(self.base, dtype, self.home or self.device)
        self.targets = add_adapters(model, self.config.lora)
        log.info(self.targets.sentence(model))
        file = Path(folder) / FILE
        if file.is_file():
            unknown, missing = _load_adapters(model, file)
            if unknown:
                raise ModelError(
                    f"{file} has adapters of layers that train.lora.targets does not name, such as {unknown[0]}: add "
                    "these layers to train.lora.targets"
                )
            if missing:
                raise ModelError(
                    f"{file} lacks the adapter {missing[0]}: restore the file, or set train.lora.targets to the layers "
                    "that it was trained with"
                )
        return model

    def state_dict(self) -> Mapping[str, Tensor]:
        return merged_state(self.model)

    def trained_state(self) -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if ".lora_" in name}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state, strict=False)

    def _save_model(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {_outer(name): tensor.detach().contiguous() for name, tensor in self.trained_state().items()}
        save_file(tensors, folder / FILE, metadata={"format": "pt"})
        peft = self.targets.peft_config()
        peft.base_model_name_or_path = str(Path(self.base).resolve())
        peft.save_pretrained(str(folder))


def merged_state(model: Any) -> dict[str, Tensor]:
    """Return the model's state dict without adapters: each adapter is merged into a copy of its weight."""
    found = {without_adapters(name): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    return found | {name: _merged(layer, name) for name, layer in adapted_weights(model)}


@torch.no_grad()
def whole_model(adapters: Path, dtype: torch.dtype) -> Any:
    """Return the base model with the adapters of a checkpoint merged into it. Raises ModelError.

    An LM head that is tied to the embedding is untied first, because an adapter may change only one of the two. It is
    tied again if head and embedding are equal after the merge."""
    peft = import_peft()
    config = peft.PeftConfig.from_pretrained(str(adapters))
    base = config.base_model_name_or_path
    if not base:
        raise ModelError(f"adapter_config.json in {adapters} does not name the base model: set base_model_name_or_path")
    if not Path(str(base), "config.json").is_file():
        raise ModelError(f"{adapters} has adapters of the model in {base}, which is missing: restore it")
    refuse_other_base(adapters, base)
    model = load_model(str(base), torch.float32, torch.device("cpu"))
    if tied := is_tied(model):
        _set_head(model, model.get_input_embeddings().weight.clone(), tied=False)
    adapted = peft.get_peft_model(model, config).eval()
    unknown, missing = _load_adapters(model, adapters / FILE)  # PEFT would rename some adapters, and skip others
    if odd := unknown + missing:
        raise ModelError(
            f"{adapters / FILE} does not fit adapter_config.json: only one of them has {odd[0]}: restore both files"
        )
    tokens = torch.arange(min(_TOKENS, model.config.vocab_size))[None]
    trained = adapted(tokens).logits.softmax(-1)
    model = adapted.merge_and_unload()
    apart = 0.5 * (model(tokens).logits.softmax(-1) - trained).abs().sum(-1).max().item()
    if apart > _ROUNDING:
        raise ModelError(
            f"the adapters in {adapters} cannot be merged: next-token distributions would change by {apart:.2g} in "
            "total variation: serve them unmerged, or train other train.lora.targets"
        )
    embedding = model.get_input_embeddings().weight
    if tied and torch.equal(embedding, model.get_output_embeddings().weight):
        _set_head(model, embedding, tied=True)
    return model.to(dtype)


def refuse_other_base(adapters: Path, base: str | Path) -> None:
    """Raise ModelError if the files in the folder `base` differ from those of the model that the adapters of a
    checkpoint were trained on."""
    state = adapters.parent / "state.json"  # holds a digest of the base model's files
    trained_on = read_json(state).get("model") if state.is_file() else None
    if trained_on and trained_on != folder_sha256(base):
        raise ModelError(
            f"the files in {base} are not those that the adapters in {adapters} were trained on: restore them"
        )


def _load_adapters(model: Any, file: Path) -> tuple[list[str], list[str]]:
    """Load the adapters in a file. Return the names that only the file has, and those that only the model has."""
    try:
        found = model.load_state_dict({_inner(name): tensor for name, tensor in load_file(file).items()}, strict=False)
    except RuntimeError:
        raise ModelError(
            f"the adapters in {file} do not fit the model: set train.lora.rank and model.path to the values that they "
            "were trained with, or restore the file"
        ) from None
    return found.unexpected_keys, [name for name in found.missing_keys if ".lora_" in name]


def _set_head(model: Any, weight: Tensor, tied: bool) -> None:
    model.get_output_embeddings().weight = weight if tied else torch.nn.Parameter(weight, requires_grad=False)
    model.config.tie_word_embeddings = tied


@torch.no_grad()
def _merged(layer: Any, name: str) -> Tensor:
    weight = layer.get_base_layer().get_parameter(name.rpartition(".")[2])
    for adapter in layer.active_adapters:
        weight = weight + layer.get_delta_weight(adapter)
    return weight


def _outer(name: str) -> str:
    """Return a parameter's name as in PEFT's files, which omit the adapter's name. In `name`, the adapter's name is
    before `.weight` for a linear layer, and at the end for an embedding."""
    return _PEFT + name.replace(f".{_ADAPTER}.", ".").removesuffix(f".{_ADAPTER}")


def _inner(name: str) -> str:
    stem = name.removeprefix(_PEFT).removesuffix(".weight")
    return f"{stem}.{_ADAPTER}" + (".weight" if name.endswith(".weight") else "")
