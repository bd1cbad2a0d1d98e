"""Comparison of an exported folder with the model that was exported.

The exporting process writes facts about its model, such as token ids, the sha256 of the weights and next-token
distributions. Then `python -m tlt.commands.export_check FOLDER FACTS` loads the folder with transformers, in a new
process, and prints the first difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from tlt.data.tokenizer import PROBES, load_tokenizer
from tlt.draft.eagle import DrafterError
from tlt.files import read_json
from tlt.models.families import DecoderOptions, ModelError, decoder_options
from tlt.models.hugging_face import is_tied
from tlt.models.weights import sha256

_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # maximum total variation distance of next-token distributions
_CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Why?"},
]


def write_facts(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write to `folder` the facts that an export of this model and tokenizer must match."""
    (folder / "facts.json").write_text(json.dumps(_facts(model, tokenizer)), encoding="utf-8")
    save_file({"probs": _distributions(model, tokenizer)}, folder / "facts.safetensors")


def check_in_new_process(export: Path, facts: Path) -> None:
    """Raise ModelError if the export differs from the facts or cannot be loaded. The message is one sentence."""
    command = [sys.executable, "-m", "tlt.commands.export_check", str(export), str(facts)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        last = (done.stderr.strip() or f"it ended with code {done.returncode}").splitlines()[-1]
        raise ModelError(done.stdout.strip() or f"the export cannot be loaded by transformers ({last})")


def difference(export: Path, facts: Path) -> str:
    """Load an export with transformers. Return a sentence about its first difference from the facts, or an empty text
    if there is none."""
    model = AutoModelForCausalLM.from_pretrained(export, local_files_only=True, attn_implementation="sdpa").eval()
    tokenizer = load_tokenizer(export)
    found = json.loads(json.dumps(_facts(model, tokenizer)))
    for name, value in read_json(facts / "facts.json").items():
        if found.get(name) != value:
            values = f"{name} was {_short(value)} and is {_short(found.get(name))}"
            return f"the export differs from the trained model: {values}"
    apart = _distributions(model, tokenizer) - load_file(facts / "facts.safetensors")["probs"]
    worst = 0.5 * apart.abs().sum(-1).max().item()
    if not worst <= _ALLOWED[model.dtype]:  # true for NaN too
        return (
            "the export differs from the trained model: the total variation distance of next-token distributions is "
            f"{worst:.2g}"
        )
    return ""


def check_drafter(folder: Path, target: DecoderOptions) -> None:
    """Raise DrafterError if a drafter's config.json describes a layer that does not fit its target."""
    config = read_json(folder / "config.json")
    found = decoder_options(LlamaConfig(**config.get("transformer_layer_config", config)))
    for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "attention_scaling"):
        if getattr(found, name) != getattr(target, name):
            raise DrafterError(f"the drafter has {name} {getattr(found, name)}, the target has {getattr(target, name)}")
    if not torch.allclose(found.inv_freq, target.inv_freq):
        raise DrafterError(
            f"the drafter's RoPE differs from the target's: compare rope_parameters in {folder / 'config.json'}"
        )


def _facts(model: Any, tokenizer: Any) -> dict[str, Any]:
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


if __name__ == "__main__":
    found = difference(Path(sys.argv[1]), Path(sys.argv[2]))
    print(found)
    sys.exit(bool(found))
