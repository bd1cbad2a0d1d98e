"""Folder of a Hugging Face model: its files, and checks that need neither torch nor transformers."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

from tlt.files import errors_as, read_json

FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("tekken.json", "chat_template*", "additional_chat_templates/*.jinja", "generation_config.json"),
)
"""patterns of the files other than config.json and the weights: tokenizer, chat template, generation defaults"""
_SINGLE = "model.safetensors"


class ModelError(ValueError):
    """Error for a model that cannot be used. The message names the problem and the remedy."""


def model_folder(folder: str | Path) -> Path:
    """Return `folder` as a Path. Raises ModelError if it does not contain a model's config.json."""
    path = Path(folder)
    if (path / "config.json").is_file():
        return path
    if (path / "adapter_config.json").is_file():
        raise ModelError(f"{path} holds only adapters: run tlt export {path} FOLDER to merge them, and give FOLDER")
    if path.exists():
        raise ModelError(f"{path} has no config.json: give the folder of a Hugging Face checkpoint")
    raise ModelError(
        f"there is no folder {path}: give the folder of a Hugging Face checkpoint, or a name on the hub such as "
        "Qwen/Qwen3-0.6B"
    )


def raw_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of config.json in a local model folder. Raises ModelError."""
    path = model_folder(folder)
    with errors_as(ModelError, f"{path} cannot be read"):
        refuse_byte_order_marks(path)
        raw = read_json(path / "config.json")
    _refuse_run(path, raw)
    if raw.get("auto_map"):
        raise ModelError(
            f"{path}: config.json asks for remote code (auto_map), which tlt never runs: remove that entry"
        )
    return raw


def refuse_no_tokenizer(path: Path) -> None:
    """Raise ModelError if a model folder has no file of a tokenizer. Without one transformers would make an empty
    tokenizer for some model families."""
    if not any(path.glob("*token*")) and not any(path.glob("vocab*")):
        raise ModelError(f"{path} has no tokenizer: copy tokenizer.json and tokenizer_config.json there")


def weight_paths(folder: str | Path) -> list[Path]:
    """Return the paths of the safetensors files of a checkpoint folder, which are not opened. Raises ModelError if one
    is missing."""
    path = Path(folder)
    index = path / "model.safetensors.index.json"
    sharded = index.is_file() and not (path / _SINGLE).is_file()
    names = _shards(index) if sharded else [_SINGLE]
    for name in names:
        if Path(name).name != name or not (path / name).is_file():
            raise ModelError(
                f"{path} has no weights file {name}: tlt reads safetensors only (save the model with save_pretrained)"
            )
    return [path / name for name in names]


def _shards(index: Path) -> list[str]:
    with errors_as(ModelError, f"{index} is not an index of safetensors files", "fetch or save it again"):
        return sorted({Path(name).as_posix() for name in read_json(index)["weight_map"].values()})


def has_chat_template(path: Path) -> bool:
    """Return whether a model folder has a chat template. Raises ModelError if tokenizer_config.json is no JSON."""
    with errors_as(ModelError, f"{path} has no tokenizer that can be loaded"):
        file = path / "tokenizer_config.json"
        return any(path.glob("*chat_template*")) or bool(file.is_file() and read_json(file).get("chat_template"))


def refuse_byte_order_marks(folder: Path) -> None:
    """Raise ModelError if a .json file in the folder begins with a byte-order mark. transformers would fail, and its
    error may name another file."""
    for file in sorted(folder.glob("*.json")):
        with file.open("rb") as content:
            if content.read(3).startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise ModelError(f"{file} begins with a byte-order mark: save it as UTF-8 without one")


def _refuse_run(path: Path, raw: dict[str, Any]) -> None:
    """Raise ModelError if the folder belongs to a run, because its config.json is a recipe, not the config of a
    model."""
    saved = sorted((path / "checkpoints").glob("step_*"))
    if "model_type" not in raw and saved:
        raise ModelError(f"{path} is the folder of a run: give {saved[-1] / 'policy'}, or a folder from tlt export")
