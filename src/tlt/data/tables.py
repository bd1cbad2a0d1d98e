"""Reader of data files: JSON lines, JSON arrays, Parquet, and data sets saved by Hugging Face's `datasets`."""

from __future__ import annotations

import codecs
import glob
import gzip
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tlt.files import errors_as, parse_json
from tlt_rl import install_hint

NO_TEMPLATE = "data.chat = true, but the model's tokenizer has no chat template: set data.chat = false"


class DataError(ValueError):
    """Error for prompts that cannot be used. The message names the file, the row and the remedy."""


KINDS = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
_OF_SAVED = ("state.json", "dataset_dict.json")  # files of a data set that `datasets` saved to disk
_OF_FUNCTIONS = ("tool_calls", "tools")  # columns whose objects have different keys in each row
_BATCH = 1000  # rows that are in memory at once as an Arrow table
_GZIP = b"\x1f\x8b"


def read_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (position, row) for each row of a file, of all files in a folder, or of all files that match a pattern such
    as `data/*.jsonl`. The position is text for error messages. Files are read in the order of their names. Raises
    DataError."""
    for file in files_of(path):
        read = _saved if file.is_dir() else _parquet if file.suffix == ".parquet" else _json
        for where, row in read(file):
            yield f"{file}, {where}", row


def files_of(path: str) -> list[Path]:
    """Return the files that `path` means, or the folder of a data set that was saved to disk. Raises DataError."""
    place = Path(path)
    if place.is_file() or any((place / name).is_file() for name in _OF_SAVED):
        return [place]
    if place.is_dir():
        found = [file for file in place.iterdir() if file.name.endswith(KINDS) and not file.name.startswith(".")]
    else:
        found = [file for file in map(Path, glob.glob(path)) if file.is_file()]
    found.sort()
    if not found and place.is_dir():
        names = ", ".join(sorted(file.name for file in place.iterdir())[:3]) or "nothing"
        raise DataError(f"{path} contains no {', '.join(KINDS)} file, but {names}: unpack or convert them")
    if not found:
        raise DataError(f"there is no file {path}: give a {', '.join(KINDS)} file, a folder of them, or a pattern")
    if place.is_dir():
        _refuse_several_sources(found)
    return found


def _refuse_several_sources(files: Sequence[Path]) -> None:
    """Raise DataError if names of files differ in more than numbers, because they may be those of several splits, such
    as train and test."""
    folder, sources = files[0].parent, dict.fromkeys(re.sub(r"\d+", "*", file.name) for file in files)
    if len(sources) > 1:
        named = ", ".join(str(folder / source) for source in list(sources)[:3])
        raise DataError(
            f"{folder} contains different data files: give one of {named}, or {folder / '*'}{files[0].suffix} for all"
        )


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (position, row) for each row of a file that has one JSON value per line, or one JSON array of rows."""
    text = path.read_bytes()
    if text.startswith(_GZIP):
        with errors_as(DataError, f"{path} is not a gzip file that can be read"):
            text = gzip.decompress(text)
    text = text.removeprefix(codecs.BOM_UTF8)
    if text.lstrip()[:1] == b"[":
        yield from ((f"row {number}", row) for number, row in enumerate(_parsed(text, str(path))))
        return
    for number, line in enumerate(text.split(b"\n"), 1):  # not str.splitlines, which also splits at U+2028
        if line.strip():
            yield f"line {number}", _parsed(line, f"{path}, line {number}")


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    parquet = _library("pyarrow.parquet", path)
    with errors_as(DataError, f"{path} is not a Parquet file that can be read"):
        yield from _numbered(parquet.ParquetFile(path).iter_batches())


def _saved(folder: Path) -> Iterator[tuple[str, Any]]:
    datasets = _library("datasets", folder)
    with errors_as(DataError, f"{folder} is not a data set that can be read", "save it again with save_to_disk"):
        found = datasets.load_from_disk(folder)
        if isinstance(found, datasets.DatasetDict):
            splits = ", ".join(str(folder / split) for split in found)
            raise DataError(f"{folder} contains a data set for each split: give one of {splits}")
        yield from _numbered(found.with_format("arrow").iter(_BATCH))


def _numbered(batches: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (position, row) for each row of Arrow tables."""
    rows = (row for batch in batches for row in batch.to_pylist())
    for number, row in enumerate(rows):
        yield f"row {number}", {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any, in_call: bool = False) -> Any:
    """Return a value without the null entries in tool calls and tool schemas. Arrow gives all calls the same keys, and
    fills missing values with null. `in_call` says that the value itself is inside a tool call or schema."""
    if isinstance(value, dict):
        kept = {key: _without_nulls(item, in_call or key in _OF_FUNCTIONS) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None or not (in_call or key in _OF_FUNCTIONS)}
    return [_without_nulls(item, in_call) for item in value] if isinstance(value, list) else value


def _library(name: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise DataError(f"{path} needs {name.partition('.')[0]}: {install_hint('data')}") from None
