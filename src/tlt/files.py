"""Files of others, whose every fault is a sentence; and what a rename relies on: that the bytes are on the disk before
the name is."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds. Raises ValueError, and OSError where it cannot be read."""
    try:
        tree = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds a {type(tree).__name__} where a JSON object is meant")
    return tree


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, with a ValueError for what is nested too deeply as well."""
    try:
        return json.loads(text if isinstance(text, str) else decoded(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def decoded(content: bytes) -> str:
    """Decode UTF-8, with or without a byte-order mark. Raises ValueError."""
    if b"\0" in content[:4]:  # of texts that begin with ASCII
        raise ValueError("it is UTF-16 or UTF-32: save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8: save it as UTF-8") from None


@contextmanager
def telling(kind: type[ValueError], what: str, remedy: str = "") -> Iterator[None]:
    """Around a library that reads a user's files: whatever it raises becomes one sentence of `kind`, `what` and why.
    Errors that are one already go through."""
    try:
        yield
    except (kind, MemoryError):
        raise
    except Exception as error:
        why = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise kind(f"{what} ({why}){remedy and f': {remedy}'}") from error


def is_text(words: str) -> bool:
    """Whether it can be written down: half of a surrogate pair, which JSON and a command line may hold, cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in words)


def refuse_to_overwrite(place: Path) -> None:
    """Raises ValueError for a folder or a file that holds anything."""
    holds = any(place.iterdir()) if place.is_dir() else place.is_file() and place.stat().st_size > 0
    if holds:
        raise ValueError(f"{place} is not empty: give another place, or move away what is there")


def share(folder: Path) -> None:
    """Whoever may read what this process writes may read all files in the folder: safetensors gives its own to their
    owner alone."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def flush(path: Path) -> None:
    """A file's bytes, or a folder's names. Raises OSError where the disk fails."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
