"""Files of a model other than config.json and the weights: tokenizer, chat template, generation defaults, model card.

Checkpoints and exports copy these files instead of saving them with transformers, because transformers would write
files that differ from those it has read, and refuses to write some valid generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt import __version__
from tlt.config import Config
from tlt.data.tokenizer import adds
from tlt.files import read_json
from tlt.models.model_folder import FILES
from tlt.wording import counted

_PRECISION = {"float64": "float64", "float32": "float32", "bfloat16": "bfloat16 autocast over float32 weights"}


def model_files(folder: str | Path, tokenizer: Any) -> dict[str, bytes]:
    """Return the files of a model folder other than config.json and weights: name -> content. `tokenizer` is the
    tokenizer loaded from this folder.

    tokenizer_config.json and chat_template.jinja are completed, so that transformers 4 and 5 load the same
    tokenizer."""
    path = Path(folder)
    found = [file for pattern in FILES for file in path.glob(pattern) if file.is_file() and file.suffix != ".py"]
    files = {str(file.relative_to(path)): file.read_bytes() for file in found}
    config = read_json(path / "tokenizer_config.json") if "tokenizer_config.json" in files else {}
    completed = _completed(config, tokenizer, "tokenizer.json" in files)
    if completed != config:
        files["tokenizer_config.json"] = (json.dumps(completed, indent=2, ensure_ascii=False) + "\n").encode()
    if isinstance(tokenizer.chat_template, str):
        files.setdefault("chat_template.jinja", tokenizer.chat_template.encode())
    return files


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files (name -> content) to a folder. Existing files are overwritten."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _completed(config: dict[str, Any], tokenizer: Any, has_json: bool) -> dict[str, Any]:
    """Return the content of tokenizer_config.json with the fields that transformers 4 and 5 need. `has_json` says
    whether there is a tokenizer.json."""
    found = dict(config)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:  # transformers 4.47 and older read only this field; newer versions prefer chat_template.jinja
        found["chat_template"] = template
    if isinstance(found.get("extra_special_tokens"), list):  # transformers 4 expects a mapping in this field
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    if not has_json:
        return found
    found |= {name: is_so for name, is_so in adds(tokenizer).items() if name in found}
    if type(tokenizer).__name__ == "TokenizersBackend":  # transformers 4 does not have this class
        names = {name: getattr(tokenizer, name) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
        found = {name: str(token) for name, token in names.items() if token} | found
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    return found


def model_card(config: Config, steps: int) -> str:
    """Return the model card (README.md) of a policy after `steps` steps, with a header for the Hugging Face hub."""
    base, rollout, train = config.model.hub or config.model.path, config.rollout, config.train
    repository = (config.model.hub or "").partition("@")[0]
    parent = f"\nbase_model: {repository}" if repository else ""
    prompts, responses = counted(rollout.prompts_per_step, "prompt"), counted(rollout.group_size, "response")
    facts = {
        "prompts": config.data.source[1],
        "reward": config.reward.named,
        "a step": f"{prompts}, {responses} each",
        "responses": f"up to {counted(rollout.max_new_tokens, 'token')} at temperature {rollout.temperature:g}",
        "algorithm": f"advantage {train.advantage}, loss {train.loss}, learning rate {train.learning_rate:g}",
        "training precision": _PRECISION[config.model.dtype],
    }
    table = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [tlt, reinforcement-learning]{parent}
---
# {Path(repository or base).name}, after {counted(steps, "step")} of reinforcement learning

Trained by [tlt](https://arxiv.org/abs/2511.16665) {__version__} from `{base}`. The licence is that of the base model.

| | |
|---|---|
{table}

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("FOLDER")
    tokenizer = AutoTokenizer.from_pretrained("FOLDER")
"""
