"""Which families of transformers tlt's engine decodes, each tried as a small random model in float64.

    python bench/families.py [NAME ...]        all causal language models of the installed transformers, or these

A family passes if greedy tokens are those of `generate`, if drafts change no token at temperature 1, and if both hold
after an update. Others are listed with the reason that a user would read.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from tlt import Engine, Prompt, SamplingParams, make_requests
from tlt.config import EngineConfig
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.tuner import Fixed
from tlt.models.choose import decoder_for, folder_weights
from tlt.models.decoder import Decoder
from tlt.models.families import is_fused, read_config
from tlt.models.hugging_face import experts_in, load_model
from tlt.rl.parity import take_weights

CPU = torch.device("cpu")
VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MORE: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "sliding_window": 70,  # shorter than the longest text
}
"""set where a family's config has the field"""
NEW = 24
LARGEST = 10_000_000


class Model:
    """A policy, as far as the engine asks one for its weights and logits."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder, torch.float64, CPU)

    def state_dict(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens[None]).logits[0]

    @torch.no_grad()
    def update(self) -> None:
        for weight in self.model.parameters():
            weight.add_(0.05 * weight.std(correction=0) * torch.randn_like(weight))

    def generate(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        settings = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "eos_token_id": None}
        tokens = torch.tensor([prompt])
        found = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
        return tuple(found[0, len(prompt) :].tolist())


def save_small(name: str, folder: Path) -> None:
    """Write a small random model of a family, with weights large enough for its tokens to depend on the context."""
    kind = CONFIG_MAPPING[name]
    known = kind().to_dict()
    if is_fused(kind()):  # it decodes as far as a window reaches
        known.pop("sliding_window", None)
    config = kind(**SIZES | {field: value for field, value in MORE.items() if field in known})
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"it has {size:,} weights with the sizes that are known here")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **experts_in(torch.float64))
    for weight in model.parameters():
        weight.data.mul_(2.0 if weight.dim() > 1 else 1.0)
    model.save_pretrained(folder)


def try_family(name: str) -> str:
    """Return "" for a family that passes, else what is wrong."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            save_small(name, folder)
        except Exception as error:  # a config may need fields that are not known here
            return f"no small model can be made ({_first_line(error)})"
        try:
            return _compare(folder)
        except ValueError as error:
            return _first_line(error)


def _compare(folder: Path) -> str:
    target = decoder_for(read_config(folder), torch.float64, CPU)
    target.load(folder_weights(folder, torch.float64), 0)
    model = Model(folder)
    for version in (0, 1):
        take_weights(target, model, version)
        plain = decode(target, 0.0, PLAIN)
        if wrong := sum(tokens != model.generate(prompt) for prompt, tokens in plain):
            return f"{wrong} of {len(plain)} greedy responses differ from generate at version {version}"
        drafted = Strategy("suffix", 6, 1, 7)
        if any(decode(target, t, PLAIN) != decode(target, t, drafted) for t in (0.0, 1.0)):
            return f"drafts change tokens at version {version}"
        model.update()
    return ""


def decode(target: Decoder, temperature: float, strategy: Strategy) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return prompts with their responses."""
    engine = Engine(target, EngineConfig(), [SuffixDrafter(10_000)] if strategy != PLAIN else [], Fixed(strategy))
    sampling = SamplingParams(temperature=temperature, max_new_tokens=NEW)
    texts = [tuple((7 * i + 3 * j) % (VOCABULARY - 8) + 3 for j in range(5 + 24 * i)) for i in range(4)]
    requests = make_requests([Prompt(i, str(i), text) for i, text in enumerate(texts)], 1, sampling, seed=3)
    found = {response.request.prompt.token_ids: tuple(response.token_ids) for response in engine.generate(requests)}
    return sorted(found.items())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    names = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    passed = 0
    for name in names:
        fault = try_family(name)
        passed += not fault
        print(f"{name:24} {fault or 'yes'}", flush=True)
    print(f"{passed} of {len(names)} families are decoded token for token")


if __name__ == "__main__":
    main()
