"""Record of the replies of environments since the last checkpoint, in the file replies.jsonl of the run.

A resumed run repeats the steps since its checkpoint. It reads the recorded replies instead of calling the environments
again.
"""

from __future__ import annotations

import json
import logging
from itertools import count
from pathlib import Path

from tlt.environments.instances import written
from tlt.rewards.verdicts import Verdict

log = logging.getLogger(__name__)
NAME = "replies.jsonl"
Key = tuple[int, int, int]
"""(step, seed of the request, number of turns of the model before the reply)"""


class ReplyRecord:
    """Replies of environments by step, request and turn, in memory and, after a call of `keep`, in a file."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._known: dict[Key, tuple[str, Verdict]] = {}  # the model's text in that turn, and the reply to it
        self._seconds: dict[Key, float] = {}

    def find(self, step: int, seed: int, texts: tuple[str, ...]) -> Verdict | None:
        """Return the recorded reply of the environment to these turns of the model; None if there is none."""
        last, verdict = self._known.get((step, seed, len(texts)), ("", None))
        return verdict if last == _last(texts) else None

    def seconds(self, step: int, seed: int, texts: tuple[str, ...]) -> float:
        """Return the seconds that the environment took for a recorded reply; 0 if the reply was read from the file."""
        return self._seconds.get((step, seed, len(texts)), 0.0)

    def add(self, step: int, seed: int, texts: tuple[str, ...], verdict: Verdict, seconds: float = 0.0) -> None:
        key, known = (step, seed, len(texts)), (_last(texts), verdict)
        if self._known.get(key) == known:
            return
        self._put(key, *known)
        self._seconds[key] = seconds
        self._write(_line(key, *known))

    def _put(self, key: Key, text: str, verdict: Verdict) -> None:
        """Store a reply in memory. Remove replies to later turns, which belong to another conversation."""
        self._known[key] = text, verdict
        step, seed, turn = key
        for later in count(turn + 1):
            if self._known.pop((step, seed, later), None) is None:
                break

    def forget_before(self, step: int) -> None:
        """Remove the replies of steps before `step` from memory."""
        self._known = {key: known for key, known in self._known.items() if key[0] >= step}
        self._seconds = {key: seconds for key, seconds in self._seconds.items() if key[0] >= step}

    def saved(self, done: int) -> None:
        """Drop the replies of the first `done` steps, because a checkpoint of these steps was saved. Keep those of a
        later step that has begun, because a resumed run repeats it."""
        self.forget_before(done)
        self._write("".join(_line(key, *known) for key, known in self._known.items()), replaces=True)

    def open(self, path: Path, resume: bool) -> None:
        """Write replies to the file `path` from now on. If the run is resumed, first read the replies in the file,
        without an incomplete last line. Otherwise empty the file."""
        self.path = path
        lines = path.read_bytes().split(b"\n")[:-1] if resume and path.is_file() else []
        self._write("".join(f"{line.decode()}\n" for line in lines), replaces=True)
        for line in map(json.loads, lines):
            key = line.pop("step"), line.pop("seed"), line.pop("turn")
            self._put(key, line.pop("said"), Verdict(**line))

    def _write(self, text: str, replaces: bool = False) -> None:
        """Append `text` to the file. If `replaces`, write a new file in its place, so that it always has the old
        content or the new."""
        if not self.path:
            return
        place = self.path.with_name(f"{NAME}.partial") if replaces else self.path
        try:
            with place.open("w" if replaces else "a", encoding="utf-8") as file:
                file.write(text)
            if replaces:
                place.replace(self.path)
        except OSError as error:
            log.warning("%s cannot be written (%s); a resumed run calls environments again", self.path, error.strerror)
            self.path = None


def _line(key: Key, text: str, verdict: Verdict) -> str:
    step, seed, turn = key
    return json.dumps({"step": step, "seed": seed, "turn": turn, "said": text, **verdict._asdict()}) + "\n"


def _last(texts: tuple[str, ...]) -> str:
    return written(texts[-1]) if texts else ""
