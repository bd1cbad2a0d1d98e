"""LoRA: a policy that trains PEFT adapters, and the merge of adapters into the weights of the base model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt.config.sections import LoraConfig
from tlt.files import read_json
from tlt.models.families import ModelError
from tlt.models.hugging_face import is_tied, load_model
from tlt.models.weights import folder_sha256
from tlt.rl.policy import Policy
from tlt_rl import install_hint

FILE = "adapter_model.safetensors"
_PEFT = "base_model.model."  # prefix of each name in PEFT's files
_ADAPTER = "default"
_TOKENS = 16  # length in tokens of the text on which merged and adapted model are compared
_ROUNDING = 1e-3  # largest total variation between merged and adapted model that float32 rounding explains


class AdaptedPolicy(Policy):
    """Policy that trains only LoRA adapters. Its checkpoints hold only the adapters, in PEFT's own format.

    `state_dict` returns the merged model, which equals the adapted one up to rounding."""

    def _load(self, folder: str | Path, dtype: torch.dtype) -> Any:
        """Return the model in `self.base` with the adapters in `folder`, or with new adapters if `folder` has none."""
        model = load_model(self.base, dtype, self.home or self.device)
        _adapt(model, self.config.lora)
        file = Path(folder) / FILE
        if file.is_file():
            inner = {_inner(name): tensor for name, tensor in load_file(file).items()}
            try:
                found = model.load_state_dict(inner, strict=False)
            except RuntimeError:
                raise ModelError(
                    f"the adapters in {file} do not fit the model: set train.lora.rank and model.path to the values "
                    "that they were trained with"
                ) from None
            if unknown := found.unexpected_keys:
                raise ModelError(
                    f"{file} has adapters of layers that train.lora.targets does not name, such as {unknown[0]}: add "
                    "these layers to train.lora.targets"
                )
            if missing := [name for name in found.missing_keys if ".lora_" in name]:
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
        peft = _peft_config(self.config.lora)
        peft.base_model_name_or_path = str(Path(self.base).resolve())
        peft.save_pretrained(str(folder))


def merged_state(model: Any) -> dict[str, Tensor]:
    """Return the model's state dict without adapters: each adapter is merged into a copy of its weight."""
    found = {n.replace(".base_layer.", "."): tensor for n, tensor in model.state_dict().items() if ".lora_" not in n}
    return found | {f"{name}.weight": _merged(layer) for name, layer in _adapted(model)}


@torch.no_grad()
def whole_model(adapters: Path, dtype: torch.dtype) -> Any:
    """Return the base model with the adapters of a checkpoint merged into it. Raises ModelError.

    An LM head that is tied to the embedding is untied first, because an adapter may change only one of the two. It is
    tied again if head and embedding are equal after the merge."""
    peft = _peft()
    base = peft.PeftConfig.from_pretrained(str(adapters)).base_model_name_or_path
    if not base:
        raise ModelError(f"adapter_config.json in {adapters} does not name the base model: set base_model_name_or_path")
    if not Path(str(base), "config.json").is_file():
        raise ModelError(f"{adapters} has adapters of the model in {base}, which is missing: restore it")
    state = adapters.parent / "state.json"  # holds a digest of the base model's files
    trained_on = read_json(state).get("model") if state.is_file() else None
    if trained_on and trained_on != folder_sha256(str(base)):
        raise ModelError(
            f"the files in {base} are not those that the adapters in {adapters} were trained on: restore them"
        )
    model = load_model(str(base), torch.float32, torch.device("cpu"))
    if tied := is_tied(model):
        _set_head(model, model.get_input_embeddings().weight.clone(), tied=False)
    adapted = peft.PeftModel.from_pretrained(model, str(adapters)).eval()
    wanted = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    if odd := sorted(wanted ^ load_file(adapters / FILE).keys()):  # PEFT skips adapters that do not fit
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


def _set_head(model: Any, weight: Tensor, tied: bool) -> None:
    model.get_output_embeddings().weight = weight if tied else torch.nn.Parameter(weight, requires_grad=False)
    model.config.tie_word_embeddings = tied


def _adapt(model: Any, config: LoraConfig) -> None:
    """Add adapters to the model and freeze all other parameters. A fixed seed gives all processes the same adapters.
    New adapters do not change the model's output."""
    if config.rank > (most := model.config.hidden_size):
        raise ModelError(f"train.lora.rank = {config.rank} is above the model's hidden_size of {most}: lower it")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            _peft().inject_adapter_in_model(_peft_config(config), model)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise ModelError(
                f"train.lora.targets do not fit the model ({reason}): give names of linear layers of the model"
            ) from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _peft_config(config: LoraConfig) -> Any:
    return _peft().LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets), task_type="CAUSAL_LM"
    )


def _adapted(model: Any) -> list[tuple[str, Any]]:
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A")]


@torch.no_grad()
def _merged(layer: Any) -> Tensor:
    weight = layer.base_layer.weight
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


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ModelError(f"train.lora needs PEFT: {install_hint('lora')}") from None
    return peft
