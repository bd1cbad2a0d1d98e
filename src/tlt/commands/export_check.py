"""Comparison of an exported folder, as transformers loads it, with the model that was exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from tlt.data.tokenizer import PROBES, load_tokenizer
from tlt.draft.drafter_folder import DrafterError
from tlt.files import first_line, read_json
from tlt.models.families import DecoderOptions, decoder_options
from tlt.models.hugging_face import is_tied
from tlt.models.model_folder import ModelError
from tlt.models.weights import sha256

_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # maximum total variation distance of next-token distributions
_CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Why?"},
]


class Facts(NamedTuple):
    """Facts that an export must have in common with the model that was exported."""

    values: dict[str, Any]
    """values by names that error messages show"""
    probs: Tensor
    """next-token distributions [N, V] at each token of some texts"""

    @staticmethod
    def of(model: Any, tokenizer: Any) -> Facts:
        return Facts(_values(model, tokenizer), _distributions(model, tokenizer))


def check_export(folder: Path, wanted: Facts) -> None:
    """Load an export with transformers. Raise ModelError, which names the first difference, if it cannot be loaded or
    differs from the model that was exported."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa").eval()
        found = Facts.of(model, load_tokenizer(folder))
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelError(f"the export cannot be loaded by transformers ({first_line(error)})") from error
    said = "the export differs from the trained model:"
    for name, value in wanted.values.items():
        if found.values.get(name) != value:
            raise ModelError(f"{said} {name} was {_short(value)} and is {_short(found.values.get(name))}")
    worst = 0.5 * (found.probs - wanted.probs).abs().sum(-1).max().item()
    if not worst <= _ALLOWED[model.dtype]:  # true for NaN too
        raise ModelError(f"{said} the total variation distance of next-token distributions is {worst:.2g}")


def check_drafter(folder: Path, target: DecoderOptions) -> None:
    """Raise DrafterError if a drafter's config.json describes a layer that does not fit its target."""
    config = read_json(folder / "config.json")
    found = decoder_options(LlamaConfig(**config))
    for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "attention_scaling"):
        if getattr(found, name) != getattr(target, name):
            raise DrafterError(f"the drafter has {name} {getattr(found, name)}, the target has {getattr(target, name)}")
    if not torch.allclose(found.inv_freq, target.inv_freq):
        raise DrafterError(
            f"the drafter's RoPE differs from the target's: compare rope_parameters in {folder / 'config.json'}"
        )


def _values(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the values that must be equal in a model and its export, by names that error messages show."""
    names = tokenizer.SPECIAL_TOKENS_ATTRIBUTES
    return {
        "whether the head is the embedding": is_tied(model),
        "the dtype": str(model.dtype),
        "the sha256 of the weights": sha256(model.state_dict()),
        **{f"the tokens of {text!r}": tokenizer(text)["input_ids"] for text in PROBES},
        **{f"the {name}": getattr(tokenizer, f"{name}_id") for name in names},
        "a chat in the chat template": _rendered(tokenizer),
    }


def _rendered(tokenizer: Any) -> str:
    """Return a chat in the template's format, or the template's error."""
    try:
        return tokenizer.apply_chat_template(_CHAT, add_generation_prompt=True, tokenize=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@torch.no_grad()
def _distributions(model: Any, tokenizer: Any) -> Tensor:
    """Return the next token's distribution at each token of the first probes, [N, V] in float32."""
    config, logits = model.config, []
    for text in PROBES[:4]:
        tokens = [token for token in tokenizer(text)["input_ids"] if token < config.vocab_size] or [0]
        logits.append(model(torch.tensor([tokens[: config.max_position_embeddings]]), use_cache=False).logits[0])
    return torch.cat(logits).float().softmax(-1)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:100]}..."
