"""Files of a model other than config.json and the weights: tokenizer, chat template, generation defaults.

Checkpoints and exports copy these files instead of saving them with transformers, because transformers would write
files that differ from those it has read, and refuses to write some valid generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt.data.tokenizer import adds
from tlt.files import read_json
from tlt.models.model_folder import FILES


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
