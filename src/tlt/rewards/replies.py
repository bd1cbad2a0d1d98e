"""The replies of environments since the last checkpoint, in a file of the run.

A resumed run repeats the steps since then. It takes the replies from here and does not ask the environments again.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tlt.rewards.verdicts import Verdict

log = logging.getLogger(__name__)
NAME = "replies.jsonl"
Key = tuple[int, int, int]
"""step, seed of the request, number of the turn: 0 is the beginning"""


class ReplyRecord:
    """Replies by step, request and turn: in memory, and if `keep` was called in a file too."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._known: dict[Key, tuple[str, Verdict]] = {}  # what the model said in the turn, and the reply
        self._seconds: dict[Key, float] = {}

    def find(self, step: int, seed: int, said: tuple[str, ...]) -> Verdict | None:
        """Return the reply to these turns, if there was one."""
        last, verdict = self._known.get((step, seed, len(said)), ("", None))
        return verdict if last == _last(said) else None

    def seconds(self, step: int, seed: int, said: tuple[str, ...]) -> float:
        """Return how long this reply was awaited in this process."""
        return self._seconds.get((step, seed, len(said)), 0.0)

    def add(self, step: int, seed: int, said: tuple[str, ...], verdict: Verdict, seconds: float = 0.0) -> None:
        known = _last(said), verdict
        if self._known.get((step, seed, len(said))) == known:
            return
        self._known[step, seed, len(said)] = known
        self._seconds[step, seed, len(said)] = seconds
        line = {"step": step, "seed": seed, "turn": len(said), "said": known[0], **verdict._asdict()}
        self._write(json.dumps(line) + "\n", "a")

    def forget_before(self, step: int) -> None:
        """Forget the replies of earlier steps, which are not needed in memory any more."""
        self._known = {key: known for key, known in self._known.items() if key[0] >= step}
        self._seconds = {key: seconds for key, seconds in self._seconds.items() if key[0] >= step}

    def clear(self) -> None:
        """Empty the file, because a checkpoint holds all that it was kept for."""
        self._write("", "w")

    def keep(self, path: Path, resume: bool) -> None:
        """Keep replies in this file from now on. If a run is resumed, first read it. A line that was cut off is
        dropped."""
        self.path = path
        lines = path.read_bytes().split(b"\n")[:-1] if resume and path.is_file() else []
        if resume:
            self._write("".join(f"{line.decode()}\n" for line in lines), "w")
        for line in map(json.loads, lines):
            key = line.pop("step"), line.pop("seed"), line.pop("turn")
            self._known[key] = line.pop("said"), Verdict(**line)

    def _write(self, text: str, mode: str) -> None:
        if not self.path:
            return
        try:
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            log.warning("%s cannot be written (%s); a resumed run asks again", self.path, error.strerror)
            self.path = None


def _last(said: tuple[str, ...]) -> str:
    return said[-1] if said else ""
