"""Tokenizer of a model, and the files of its folder other than config.json and the weights.

The tokenizer behaves as tokenizer.json defines it. transformers 5 loads some tokenizers with only the vocabulary of
tokenizer.json, and splits texts by the rules of its own classes. But models are trained and served with the rules in
tokenizer.json.

Checkpoints and exports copy the files instead of saving them with transformers, because transformers would write files
that differ from those it has read, and refuses to write some valid generation_config.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tlt.files import errors_as, read_json
from tlt.models.families import read_config
from tlt.models.model_folder import FILES, ModelError, refuse_byte_order_marks, refuse_no_tokenizer
from tlt.spelling import Detokenizer

log = logging.getLogger(__name__)

PROBES = (
    *("a", "The cat sat on 12345 mats, 2023; hello there", "  two  spaces", " one\n\n\ttwo \n three", "x=3.14*(7-2)"),
    *(
        "Don't you'll ÉCOLE naïve",
        "你好，世界。",
        "한국어 かな",
        "🙂👩‍👩‍👧 é e\u0301 ﬁ \u00a0",
        "<b>\\frac{1}{2}</b>",
        "\x07\u200b\ufeff",
    ),
)
"""texts that two tokenizers often encode differently, to compare them"""


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a model folder, or of a folder with LoRA adapters. Remote code is never run. Raises
    ModelError if there is no tokenizer or it cannot be loaded."""
    path = Path(folder)
    if not (path / "adapter_config.json").is_file():
        read_config(path)  # transformers would report an error in config.json as one of the tokenizer
    refuse_no_tokenizer(path)
    with errors_as(ModelError, f"{path} has no tokenizer that can be loaded"):
        refuse_byte_order_marks(path)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (path / name).is_file():
                read_json(path / name)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        tokenizer.decode(tokenizer("a")["input_ids"])
        if (path / "tokenizer.json").is_file():
            tokenizer = _as_the_file_says(tokenizer, path)
    return tokenizer


def _as_the_file_says(loaded: Any, path: Path) -> Any:
    """Return `loaded`, the tokenizer that transformers has loaded. If it differs from tokenizer.json, log a warning and
    return a tokenizer built from tokenizer.json."""
    file = Tokenizer.from_file(str(path / "tokenizer.json"))
    file.no_truncation()  # as in transformers, where the caller sets truncation and padding
    file.no_padding()
    difference = _difference(loaded, file)
    if not difference:
        return loaded
    names = {name: getattr(loaded, name) for name in loaded.SPECIAL_TOKENS_ATTRIBUTES}
    named = {name: token for name, token in names.items() if token and file.token_to_id(str(token)) is not None}
    own = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True, **named)
    if _difference(own, file):
        _warn(f"tokenizer_config.json in {path} changes tokenizer.json, and tlt uses both: {difference}")
    else:
        _warn(
            f"transformers loads {path} as a {type(loaded).__name__} that differs from tokenizer.json; tlt uses "
            f"tokenizer.json: {difference}"
        )
    return own


def _difference(tokenizer: Any, file: Tokenizer) -> str:
    """Compare a tokenizer with tokenizer.json (`file`) on `PROBES` and on all added tokens. Return a description of the
    first text that the two encode or decode differently; empty if there is none."""
    added = [token.content for token in file.get_added_tokens_decoder().values()]
    for text in (*PROBES, *(f"a{token} b\n{token}c {token}" for token in added)):
        ours, its = tokenizer(text)["input_ids"], file.encode(text).ids
        if ours != its:
            first = next(
                (i for i, (a, b) in enumerate(zip(ours, its, strict=False)) if a != b), min(len(ours), len(its))
            )
            shown = [tokenizer.convert_ids_to_tokens(ids[first : first + 3]) for ids in (ours, its)]
            return f"from token {first} on, {text!r} has {shown[0]}, but {shown[1]} with tokenizer.json"
        if file.decoder and Detokenizer(tokenizer)(its) != file.decode(its):
            decoded = Detokenizer(tokenizer)(its)
            return f"{text!r} is decoded as {decoded!r}, but as {file.decode(its)!r} with tokenizer.json"
    return ""


def adds(tokenizer: Any) -> dict[str, bool]:
    """Return whether the tokenizer adds a BOS token before and an EOS token after each text. The keys are the field
    names in tokenizer_config.json: `add_bos_token` and `add_eos_token`."""
    ids = tokenizer("a")["input_ids"]
    first, last = (
        token is not None and ids[i] == token
        for i, token in ((0, tokenizer.bos_token_id), (-1, tokenizer.eos_token_id))
    )
    return {"add_bos_token": first, "add_eos_token": last}


@cache
def _warn(text: str) -> None:
    """Log a warning, but only once in a process, because several parts of a run may load the same tokenizer."""
    log.warning(text)


# -- files of a model folder -------------------------------------------------------------------------------------------


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
