"""Functions for files: errors in user files become one sentence, and writes are flushed to the disk before a rename."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError, or OSError if the file cannot be read."""
    try:
        tree = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(tree).__name__}")
    return tree


def parse_json(text: str | bytes) -> Any:
    """Parse JSON like `json.loads`, but also raise ValueError if it is nested too deeply."""
    try:
        return json.loads(text if isinstance(text, str) else decoded(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def decoded(content: bytes) -> str:
    """Decode UTF-8, with or without a byte-order mark. Raises ValueError."""
    if b"\0" in content[:4]:  # true for UTF-16 and UTF-32 if the first character is ASCII
        raise ValueError("it is UTF-16 or UTF-32: save the file as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8: save the file as UTF-8") from None


@contextmanager
def errors_as(kind: type[ValueError], what: str, remedy: str = "") -> Iterator[None]:
    """Turn errors of a library that reads a user's file into errors of type `kind`. The message is one sentence:
    `what`, the last line of the original error, and `remedy`. Errors of type `kind` and MemoryError pass unchanged."""
    try:
        yield
    except (kind, MemoryError):
        raise
    except Exception as error:
        why = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise kind(f"{what} ({why}){remedy and f': {remedy}'}") from error


@contextmanager
def writing(path: Path, kind: type[ValueError]) -> Iterator[None]:
    """Turn an OSError of the block, which writes the file `path`, into an error of type `kind` with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = "free disk space, or check the permissions of the folder"
        raise kind(f"{path} cannot be written ({error.strerror or error}): {remedy}") from None


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically: readers see the old content or the new. Raises OSError."""
    fresh = path.with_name(path.name + ".partial")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


def is_text(words: str) -> bool:
    """Return whether a string can be encoded as UTF-8. JSON and command lines may contain lone surrogates, which
    cannot be encoded."""
    return not any("\ud800" <= char <= "\udfff" for char in words)


def refuse_to_overwrite(place: Path) -> None:
    """Raise ValueError for a folder or a file that is not empty."""
    holds = any(place.iterdir()) if place.is_dir() else place.is_file() and place.stat().st_size > 0
    if holds:
        raise ValueError(f"{place} is not empty: give another path, or move its content away")


def share(folder: Path) -> None:
    """Give all files in a folder the permissions that a new file of this process has. safetensors makes files that only
    their owner can read."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def flush(path: Path) -> None:
    """Write a file's content, or a folder's list of names, to the disk. Raises OSError if the disk fails."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
