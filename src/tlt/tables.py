"""Rows of files: JSON lines, a JSON array, Parquet, and data sets that Hugging Face's `datasets` saved to disk."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tlt.files import hub_download, parse_json, telling
from tlt_rl import install_hint


class DataError(ValueError):
    """Prompts that cannot be used; the message names the file, the row and the remedy."""


KINDS = (".jsonl", ".json", ".parquet", ".arrow")
_NOT_DATA = {"dataset_info.json", "state.json", "dataset_dict.json"}  # beside the .arrow files of a saved data set


def read_rows(path: str) -> Iterator[tuple[str, Any]]:
    """(where it is, row) of a file, of all files of a folder, or of those that a pattern such as `data/*.jsonl` means,
    in the order of their names. Raises DataError."""
    for file in files_of(path):
        read = {".parquet": _parquet, ".arrow": _arrow}.get(file.suffix, _json)
        for where, row in read(file):
            yield f"{file}, {where}", row


def files_of(path: str) -> list[Path]:
    place = Path(path)
    if place.is_dir():
        found = sorted(file for file in place.iterdir() if file.suffix in KINDS and file.name not in _NOT_DATA)
    elif place.is_file():
        found = [place]
    else:
        found = sorted(map(Path, glob.glob(path)))
    download = hub_download(path)
    if not found and download and place.suffix not in KINDS:
        raise DataError(
            f"there is no file {path}; if it is a data set's name on the Hugging Face hub, download it first, as tlt "
            f"fetches nothing: {download} --repo-type dataset, then give the files of one split, such as "
            f"{place.name}/*/train*.parquet"
        )
    if not found:
        raise DataError(f"there is no file {path}: name a {', '.join(KINDS)} file, a folder of such, or a pattern")
    return found


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """A row each line, or an array of rows."""
    text = path.read_bytes()
    if text.lstrip()[:1] == b"[":
        yield from ((f"row {number}", row) for number, row in enumerate(_parsed(text, str(path))))
        return
    for number, line in enumerate(text.split(b"\n"), 1):  # str.splitlines breaks at U+2028 too
        if line.strip():
            yield f"line {number}", _parsed(line, f"{path}, line {number}")


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    pyarrow = _pyarrow(path)
    with telling(DataError, f"{path} is not a Parquet file that can be read"):
        rows = pyarrow.parquet.read_table(path).to_pylist()
    yield from ((f"row {number}", row) for number, row in enumerate(rows))


def _arrow(path: Path) -> Iterator[tuple[str, Any]]:
    pyarrow = _pyarrow(path)
    with (
        telling(DataError, f"{path} is not an Arrow file that can be read"),
        pyarrow.memory_map(str(path)) as source,
        pyarrow.ipc.open_stream(source) as stream,
    ):
        rows = stream.read_all().to_pylist()
    yield from ((f"row {number}", row) for number, row in enumerate(rows))


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path} needs pyarrow: {install_hint('parquet')}") from None
    return pyarrow


def column(row: Any, name: str) -> Any:
    """The value under a name, or a path of names such as `reward_model.ground_truth`; None where there is none."""
    if not isinstance(row, dict) or name in row:
        return row.get(name) if isinstance(row, dict) else None
    first, _, rest = name.partition(".")
    return column(row.get(first), rest) if rest else None


def messages_of(question: Any) -> list[dict[str, Any]] | None:
    """A list of messages as TRL and verl have it; None where it is none."""
    if not isinstance(question, Sequence) or isinstance(question, str) or not question:
        return None
    known = all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in question)
    return list(question) if known else None
