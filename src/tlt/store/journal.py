"""Journal of the responses since the last checkpoint. A run that was killed decodes the same requests again from the
same target. The journal's responses are then drafts, so that it catches up quickly.

A record has the seed (8 bytes), the lengths of prompt and response (4 bytes each), and their tokens (4 bytes each),
little-endian."""

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
    """File of the newest records, with at most `most_tokens` response tokens. It affects only the speed. If it cannot
    be written, the run continues without it."""

    def __init__(self, path: Path, most_tokens: int) -> None:
        self.path, self.most_tokens = path, most_tokens
        self._tokens, self._fails = 0, False

    def add(self, response: Response) -> None:
        said = Ahead.of(response, version=0, ended=True)
        self._tokens += len(said.tokens)
        self._write(_record(said), "ab")
        if self._tokens > self.most_tokens:
            self._keep(self.read())

    def clear(self) -> None:
        """Delete all records, because a checkpoint was saved."""
        self._keep([])

    def read(self) -> list[Ahead]:
        """Read all complete records. A killed run may have left an incomplete one at the end."""
        data, found, at = self.path.read_bytes() if self.path.is_file() else b"", [], 0
        while at + _HEAD.size <= len(data):
            seed, prompt, tokens = _HEAD.unpack_from(data, at)
            start, at = at + _HEAD.size, at + _HEAD.size + 4 * (prompt + tokens)
            if at > len(data):
                break
            both = np.frombuffer(data[start:at], dtype="<i4").astype(np.int32)
            found.append(Ahead(seed, tuple(both[:prompt].tolist()), both[prompt:], 0, ended=True))
        return found

    def take_up(self) -> list[Ahead]:
        """Return the records of the run that is resumed. An incomplete last record is dropped."""
        found = self.read()
        self._keep(found)
        return found

    def _keep(self, found: list[Ahead]) -> None:
        """Keep the newest of these records, with at most half of `most_tokens`."""
        kept: list[Ahead] = []
        self._tokens = 0
        for said in reversed(found):
            if self._tokens + len(said.tokens) > self.most_tokens // 2:
                break
            self._tokens += len(said.tokens)
            kept.append(said)
        self._write(b"".join(map(_record, reversed(kept))), "wb")

    def _write(self, data: bytes, mode: str) -> None:
        if self._fails:
            return
        try:
            with self.path.open(mode) as file:
                file.write(data)
        except OSError as error:
            log.warning("%s cannot be written (%s); the run continues without it", self.path, error.strerror)
            self._fails = True


def _record(said: Ahead) -> bytes:
    tokens = np.array([*said.prompt, *said.tokens], dtype="<i4").tobytes()
    return _HEAD.pack(said.seed, len(said.prompt), len(said.tokens)) + tokens
