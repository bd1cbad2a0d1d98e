"""Comparison of an exported folder, as transformers loads it, with the model that was exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from tlt.data.tokenizer import PROBES, load_tokenizer
from tlt.draft.drafter_folder import DrafterError
from tlt.files import first_line, read_json
from tlt.models.families import DecoderOptions, decoder_options
from tlt.models.model_folder import ModelError
from tlt.models.weights import sha256

_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # maximum total variation distance of next-token distributions


class Facts(NamedTuple):
    """Facts that an export must have in common with the model that was exported."""

    weights: str
    """sha256 of the weights"""
    tokens: list[list[int]]
    """token ids of some texts"""
    probs: Tensor
    """next-token distributions [N, V] at each token of some texts"""

    @staticmethod
    def of(model: Any, tokenizer: Any) -> Facts:
        tokens = [tokenizer(text)["input_ids"] for text in PROBES]
        return Facts(sha256(model.state_dict()), tokens, _distributions(model, tokens))


def check_export(folder: Path, wanted: Facts) -> None:
    """Load an export with transformers. Raise ModelError, which names the first difference, if it cannot be loaded or
    differs from the model that was exported."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa").eval()
        found = Facts.of(model, load_tokenizer(folder))
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelError(f"the export cannot be loaded by transformers ({first_line(error)})") from error
    said = "the export differs from the trained model:"
    if found.weights != wanted.weights:
        raise ModelError(f"{said} the sha256 of the weights was {wanted.weights} and is {found.weights}")
    for text, ours, its in zip(PROBES, wanted.tokens, found.tokens, strict=True):
        if ours != its:
            raise ModelError(f"{said} the tokens of {text!r} were {ours} and are {its}")
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


@torch.no_grad()
def _distributions(model: Any, tokens: list[list[int]]) -> Tensor:
    """Return the next token's distribution at each token of the first texts, [N, V] in float32."""
    config, logits = model.config, []
    for text in tokens[:4]:
        known = [token for token in text if token < config.vocab_size] or [0]
        logits.append(model(torch.tensor([known[: config.max_position_embeddings]]), use_cache=False).logits[0])
    return torch.cat(logits).float().softmax(-1)
