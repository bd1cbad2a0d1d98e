"""Reader of data files: JSON lines, JSON arrays, Parquet, and data sets saved by Hugging Face's `datasets`."""

from __future__ import annotations

import codecs
import glob
import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tlt.files import errors_as, parse_json, read_json
from tlt_rl import install_hint


class DataError(ValueError):
    """Error for prompts that cannot be used. The message names the file, the row and the remedy."""


KINDS = (".jsonl", ".json", ".parquet", ".arrow", ".jsonl.gz", ".json.gz")
_OF_ONE_SPLIT = ("dataset_info.json", "state.json")  # files of a data set saved by `datasets`
_NOT_DATA = {*_OF_ONE_SPLIT, "dataset_dict.json", "dataset_infos.json"}
SPLITS = {  # word in a file's name -> split of the file, as `datasets` infers it
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_OF_FUNCTIONS = ("tool_calls", "tools")  # columns whose objects have different keys in each row
_GZIP = b"\x1f\x8b"
_OTHER_PACKING = {  # first bytes of a file -> name of its compression, and the command that unpacks it
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"\xfd7zXZ\x00": ("xz", "xz -d"),
    b"BZh": ("bzip2", "bzip2 -d"),
    b"PK\x03\x04": ("zip", "unzip"),
}


def read_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (position, row) for each row of a file, of all files in a folder, or of all files that match a pattern such
    as `data/*.jsonl`. The position is text for error messages. Files are read in the order of their names. Raises
    DataError."""
    for file in files_of(path):
        read = {".parquet": _parquet, ".arrow": _arrow}.get(file.suffix, _json)
        for where, row in read(file):
            yield f"{file}, {where}", row


def files_of(path: str) -> list[Path]:
    place = Path(path)
    if (place / "dataset_dict.json").is_file() or all((place / name).is_file() for name in _OF_ONE_SPLIT):
        return _saved(place)
    if place.is_dir():
        found = [file for file in place.iterdir() if file.name.endswith(KINDS) and not file.name.startswith(".")]
        _refuse_splits(found)
    elif place.is_file():
        return [place]
    else:
        found = [file for file in map(Path, glob.glob(path)) if file.is_file()]
    found = sorted(file for file in found if file.name not in _NOT_DATA and not file.match("cache-*.arrow"))
    if not found and place.is_dir():
        names = ", ".join(sorted(file.name for file in place.iterdir())[:3]) or "nothing"
        raise DataError(f"{path} contains no {', '.join(KINDS)} file, but {names}: unpack or convert them")
    if not found:
        raise DataError(f"there is no file {path}: give a {', '.join(KINDS)} file, a folder of them, or a pattern")
    return found


def _refuse_splits(files: list[Path]) -> None:
    """Raise DataError if the files belong to several splits, such as train and test. Data sets of the hub often have
    all splits in one folder."""
    by_split: dict[str, str] = {}
    for file in sorted(files):
        word = next((word for word in re.split(r"[\W\d_]+", file.name) if word.lower() in SPLITS), None)
        if word:
            by_split[SPLITS[word.lower()]] = str(file.parent / f"*{word}*{file.suffix}")
    if len(by_split) > 1:
        raise DataError(
            f"{files[0].parent} contains files of several splits ({', '.join(by_split)}): give one of "
            f"{', '.join(by_split.values())}"
        )


def _saved(folder: Path) -> list[Path]:
    """Return the Arrow files of a data set saved with save_to_disk, without cache files. Raises DataError."""
    with errors_as(DataError, f"{folder} is not a data set that can be read", "save it again with save_to_disk"):
        if (folder / "dataset_dict.json").is_file():
            splits = [f"{folder / split}" for split in read_json(folder / "dataset_dict.json")["splits"]]
            raise DataError(f"{folder} contains a data set for each split: give one of {', '.join(splits)}")
        state = read_json(folder / "state.json")
        if state.get("_indices_data_files"):  # datasets before 1.8 stored the indices of the rows that a filter kept
            raise ValueError("state.json has _indices_data_files")
        return [folder / file["filename"] for file in state["_data_files"]]


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (position, row) for each row of a file that has one JSON value per line, or one JSON array of rows."""
    text = path.read_bytes()
    if text.startswith(_GZIP):
        with errors_as(DataError, f"{path} is not a gzip file that can be read"):
            text = gzip.decompress(text)
    for start, (kind, command) in _OTHER_PACKING.items():
        if text.startswith(start):
            raise DataError(
                f"{path} is packed with {kind}, but tlt unpacks only gzip: unpack it with {command} {path.name}"
            )
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
    pyarrow = _pyarrow(path)
    with errors_as(DataError, f"{path} is not a Parquet file that can be read"):
        rows = pyarrow.parquet.read_table(path).to_pylist()
    yield from _numbered(rows)


def _arrow(path: Path) -> Iterator[tuple[str, Any]]:
    pyarrow = _pyarrow(path)
    with (
        errors_as(DataError, f"{path} is not an Arrow file that can be read"),
        pyarrow.memory_map(str(path)) as source,
        pyarrow.ipc.open_stream(source) as stream,
    ):
        rows = stream.read_all().to_pylist()
    yield from _numbered(rows)


def _numbered(rows: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows):
        yield f"row {number}", {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any, in_call: bool = False) -> Any:
    """Return a value without the null entries in tool calls and tool schemas. Arrow gives all calls the same keys, and
    fills missing values with null. `in_call` says that the value itself is inside a tool call or schema."""
    if isinstance(value, dict):
        kept = {key: _without_nulls(item, in_call or key in _OF_FUNCTIONS) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None or not (in_call or key in _OF_FUNCTIONS)}
    return [_without_nulls(item, in_call) for item in value] if isinstance(value, list) else value


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path} needs pyarrow: {install_hint('parquet')}") from None
    return pyarrow
