"""Files of a model except config.json and its weights: tokenizer, chat template, generation defaults.

Checkpoints and exports copy them, because transformers would write other files than it has read. It also refuses to
write some generation_config.json that every engine reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt.data.tokenizer import adds
from tlt.files import read_json

PATTERNS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("tekken.json", "chat_template*", "additional_chat_templates/*.jinja", "generation_config.json"),
)


def model_files(folder: str | Path, tokenizer: Any) -> dict[str, bytes]:
    """Read the files of a model folder: name -> content. `tokenizer` is the tokenizer loaded from it.

    tokenizer_config.json and the chat template are completed, so that transformers 4 and 5 read them alike."""
    path = Path(folder)
    found = [file for pattern in PATTERNS for file in path.glob(pattern) if file.is_file() and file.suffix != ".py"]
    files = {str(file.relative_to(path)): file.read_bytes() for file in found}
    config = read_json(path / "tokenizer_config.json") if "tokenizer_config.json" in files else {}
    completed = _completed(config, tokenizer, "tokenizer.json" in files)
    if completed != config:
        files["tokenizer_config.json"] = (json.dumps(completed, indent=2, ensure_ascii=False) + "\n").encode()
    if isinstance(tokenizer.chat_template, str):
        files.setdefault("chat_template.jinja", tokenizer.chat_template.encode())
    return files


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files to a folder, and overwrite existing ones."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _completed(config: dict[str, Any], tokenizer: Any, has_json: bool) -> dict[str, Any]:
    """Return tokenizer_config.json with the fields that transformers 4 and 5 need."""
    found = dict(config)
    template = tokenizer.chat_template
    if template:  # transformers 4.47 and older read only this, and newer versions prefer chat_template.jinja
        several = (
            [{"name": name, "template": text} for name, text in template.items()]
            if isinstance(template, dict)
            else None
        )
        found["chat_template"] = several or template
    if isinstance(found.get("extra_special_tokens"), list):  # transformers 4 needs a mapping under that name
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    if not has_json:
        return found
    found |= {name: is_so for name, is_so in adds(tokenizer).items() if name in found}
    if type(tokenizer).__name__ == "TokenizersBackend":  # transformers 4 does not know this name
        names = {name: getattr(tokenizer, name) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
        found = {name: str(token) for name, token in names.items() if token} | found
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    return found
