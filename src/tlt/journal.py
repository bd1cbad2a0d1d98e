"""What was said since the last checkpoint. A run that was killed says it once more, from the same targets: with its
responses as drafts it is soon where it was.

A record has the seed (8 bytes), the lengths of prompt and response (4 each) and both (4 a token), little-endian.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import numpy as np

from tlt.draft.ahead import Ahead
from tlt.types import Response

log = logging.getLogger(__name__)
_HEAD = struct.Struct("<QII")


class Journal:
    """Nothing depends on it but speed: where it cannot be written, the run goes on without."""

    def __init__(self, path: Path) -> None:
        self.path, self._fails = path, False

    def add(self, response: Response) -> None:
        said = Ahead.of(response, version=0, ended=True)
        record = _HEAD.pack(said.seed, len(said.prompt), len(said.tokens))
        self._write(record + np.array([*said.prompt, *said.tokens], dtype="<i4").tobytes(), "ab")

    def clear(self) -> None:
        """A checkpoint holds all that it was kept for."""
        self._write(b"", "wb")

    def read(self) -> list[Ahead]:
        """Whole records: a run that was killed may have left a part of one at the end."""
        data, found, at = self.path.read_bytes() if self.path.is_file() else b"", [], 0
        while at + _HEAD.size <= len(data):
            seed, prompt, tokens = _HEAD.unpack_from(data, at)
            start, at = at + _HEAD.size, at + _HEAD.size + 4 * (prompt + tokens)
            if at > len(data):
                break
            both = np.frombuffer(data[start:at], dtype="<i4").astype(np.int32)
            found.append(Ahead(seed, tuple(both[:prompt].tolist()), both[prompt:], 0, ended=True))
        return found

    def _write(self, data: bytes, mode: str) -> None:
        if self._fails:
            return
        try:
            with self.path.open(mode) as file:
                file.write(data)
        except OSError as error:
            log.warning("%s cannot be written (%s); going on without", self.path, error.strerror)
            self._fails = True
