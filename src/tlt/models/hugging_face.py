"""Models of transformers: loading, saving, activation checkpointing, and the output head alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from tlt.files import errors_as, read_json
from tlt.models.model_folder import ModelError, refuse_byte_order_marks
from tlt.models.weights import weight_files

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_LINEAR = 1e-4  # tolerance relative to the largest logit, up to which logits count as proportional
_ALIGNMENT = 64  # bytes; torch allocates memory at multiples of it on CPUs


def load_model(folder: str | Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the transformers model in a folder, in evaluation mode (without dropout). Raises ModelError."""
    if (file := Path(folder) / _GENERATION).is_file():
        refuse_byte_order_marks(file.parent)
        with errors_as(ModelError, f"{file} cannot be used by transformers", "correct it, or remove it"):
            GenerationConfig.from_pretrained(folder)
    weight_files(folder)  # transformers does not name a damaged file
    with errors_as(ModelError, f"{folder} cannot be loaded as a model to train"):
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by their names
            **experts_in(dtype),
        )
        model, loaded = found
    odd = [f"another shape of {name}" for name, *_ in loaded["mismatched_keys"]]
    for what, names in (("have", odd), ("lack", loaded["missing_keys"]), ("hold", loaded["unexpected_keys"])):
        if names:  # transformers would initialize the first two at random and ignore the last
            raise ModelError(
                f"the weights in {folder} {what} {min(names)}, and do not fit its config.json: fetch or save it again"
            )
    model.source_config = read_json(Path(folder) / _CONFIG)
    model.to(device)
    _align(model)
    model.eval()  # no dropout: old and new log-probs must come from the same function
    return model


def _align(model: nn.Module) -> None:
    """Copy weights whose address is not a multiple of 64 bytes, which occur if their file is memory-mapped. The
    rounding of MKL's products depends on the address, so without the copy a resumed run could end with other
    weights."""
    for parameter in model.parameters():
        if parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


def experts_in(dtype: torch.dtype) -> dict[str, str]:
    """Return arguments for transformers' model loading that choose the implementation of experts for this dtype. In
    float64 it is "eager", because torch's grouped matrix product has no float64."""
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}


def save_model(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write config.json and weights to a folder. `weights` are the weights to write (default: the model's own).

    config.json is that of the folder from which `load_model` loaded the model, except for what training may change.
    transformers would write it with the field names of its own version, and other versions ignore unknown names. If the
    folder names no `architectures`, they are added, because vLLM needs them.

    generation_config.json is not written, but copied (`data/tokenizer.py`), because transformers refuses to write
    some that it can read. In a process group, transformers writes on rank 0 only, but here any rank may save."""
    generation, model.generation_config = model.generation_config, GenerationConfig()
    model.should_save_on_this_rank = lambda is_main_process: True
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.generation_config = generation
        del model.should_save_on_this_rank
    (folder / _GENERATION).unlink()
    dtype = str(model.dtype).removeprefix("torch.")
    changed = {"dtype": dtype, "torch_dtype": dtype, "tie_word_embeddings": is_tied(model)}
    config = {"architectures": model.config.architectures} | model.source_config | changed
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def as_in_files(config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a model's weights with the names and shapes that they have in checkpoint files.

    In memory, transformers 5 uses other names and shapes for some families, for example one tensor for all experts of a
    layer."""
    return revert_weight_conversion(empty_model(config), dict(weights))


def empty_model(config: PreTrainedConfig) -> Any:
    """Return the transformers model of a config, with weights that have shapes but no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def is_tied(model: Any) -> bool:
    """Return whether the model's head and embedding are the same tensor, whatever config.json says."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def names_of_ends(model: Any) -> list[str]:
    """Return the names of a model's embedding and head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if module in ends]


def is_named(name: str, target: str) -> bool:
    """Return whether `target` is the end of a layer's name, in whole words between dots."""
    return f".{name}".endswith(f".{target}")


def checkpointable_layers(model: Any) -> list[Any]:
    """Return the layers of transformers' model that support activation checkpointing, which are its decoder layers."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(model: Any) -> None:
    """Turn on activation checkpointing: the backward pass computes the activations of each layer again. Raises
    ModelError if the model does not support it."""
    layers = checkpointable_layers(model)
    if not (layers and model.supports_gradient_checkpointing):
        raise ModelError(
            f"models of type {model.config.model_type} have no gradient checkpointing in transformers: set "
            "train.gradient_checkpointing = false"
        )
    newer = getattr(model, "activation_checkpointing_enable", None)  # the older name is deprecated
    enable = newer or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": False})
    for layer in layers:
        layer.training = True  # transformers checkpoints only in training mode
        layer._gradient_checkpointing_func = partial(_checkpoint, layer, layer._gradient_checkpointing_func)


def _checkpoint(layer: Any, checkpoint: Callable[..., Any], forward: Callable[..., Any], *inputs: Any) -> Any:
    """Run a layer under activation checkpointing, but in evaluation mode, because some families apply dropout in the
    layer itself."""

    def evaluate(*inputs: Any) -> Any:
        layer.training = False
        try:
            return forward(*inputs)
        finally:
            layer.training = True

    return checkpoint(evaluate, *inputs)


# -- the output head ---------------------------------------------------------------------------------------------------


class Head:
    """Function from hidden states after the final norm to logits, by the model's own code, with its scalings and soft
    caps. It shares the model's weights, so it follows their changes."""

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
