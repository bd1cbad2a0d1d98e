"""What a rename relies on: that the bytes are on the disk before the name is."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """A file's bytes, or a folder's names. Raises OSError where the disk fails."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
