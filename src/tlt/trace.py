"""Trace of a run: spans of time of every worker, the seconds that workers spend in each state, and the file trace.json
for ui.perfetto.dev or chrome://tracing.

Consecutive spans of the same work are joined, so that a rollout of a million rounds stays small."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tlt.files import writing

ROLLOUT, IDLE, AHEAD, SPOT = "ROLLOUT", "IDLE", "AHEAD", "SPOT"
UPDATE, ABSENT, COMPARE = "UPDATE", "ABSENT", "COMPARE"


class StateFacts(NamedTuple):
    """Name, colour and words of a state of a worker, for display, metrics and report."""

    colour: str
    """colour in the live display; those of the report are in report/page.html and page.js"""
    word: str
    """word in the report"""
    useful: bool | tuple[str, str] = False
    """Whether the time in this state is useful. With two counters of the rollout, the ratio of the first to the second
    is its useful share."""


FACTS = {
    ROLLOUT: StateFacts("green", "decoding", useful=True),
    AHEAD: StateFacts("cyan", "look-ahead", ("seen_ahead", "ahead_tokens")),
    SPOT: StateFacts("yellow", "drafter training"),
    UPDATE: StateFacts("blue", "update", useful=True),
    IDLE: StateFacts("bright_black", "idle"),
    ABSENT: StateFacts("bright_red", "absent"),
    COMPARE: StateFacts("red", "comparison"),
}
"""All states of a worker: decoding, kinds of idle work, update, nothing to do, missing, and comparison with plain
decoding. All other names of spans are kinds of work: prefill, plain, speculative, ahead, spot, judge, update, sync,
 save, ..."""
STATES = tuple(state for state in FACTS if state != COMPARE)
"""states whose seconds are counted; a comparison is no part of a step"""

_JOINED = 0.005  # spans of the same name with a shorter gap, in seconds, are joined
_MOST = 100_000  # largest number of spans kept; the oldest are dropped


class TraceError(ValueError):
    """Error for a trace that cannot be written. The message names the file and the remedy."""


class Span(NamedTuple):
    """Period in which a worker did one kind of work or was in one state. `start` and `end` are in seconds since 1970,
    so that spans of several processes fit together."""

    name: str
    start: float
    end: float
    facts: dict[str, float]
    """counts of the work, such as `tokens`; joined spans add them up"""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Tracer:
    """Recorder of the spans of one process, until they are drained. Beyond 100,000 spans it drops the oldest."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=_MOST)
        self._state: tuple[str, float] | None = None

    def add(self, name: str, start: float, end: float, **facts: float) -> None:
        """Add a span that has ended. If the clock was set back, its duration is 0."""
        end = max(start, end)
        if self._spans and self._spans[-1].name == name and 0 <= start - self._spans[-1].end < _JOINED:
            last = self._spans.pop()
            start, facts = last.start, last.facts | {key: last.facts.get(key, 0) + facts[key] for key in facts}
        self._spans.append(Span(name, start, end, facts))

    def mark(self, name: str, **facts: float) -> None:
        """Add a span without duration, with its counts. It is never joined with another one."""
        now = time.time()
        self._spans.append(Span(name, now, now, facts))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time())

    @property
    def state(self) -> str:
        """Present state of the worker; IDLE before the first `enter`."""
        return self._state[0] if self._state else IDLE

    def enter(self, state: str) -> None:
        """Change the worker's state. The time in the previous state becomes a span."""
        if self._state and self._state[0] == state:
            return
        self._state = state, self._end_stay()

    def drain(self) -> list[Span]:
        """Return all recorded spans and remove them. They include a span for the time in the present state until now,
        if `enter` was called."""
        self._end_stay()
        spans, self._spans = list(self._spans), deque(maxlen=_MOST)
        return spans

    def _end_stay(self) -> float:
        """Add a span for the time in the present state so far. Return the end of the span, in seconds since 1970."""
        now = time.time()
        if self._state:
            state, start = self._state
            now = max(start, now)
            self._spans.append(Span(state, start, now, {}))
            self._state = state, now
        return now


def seconds_by_state(spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds that one worker spent in each state of `STATES`, from its spans."""
    seconds: dict[str, float] = dict.fromkeys(STATES, 0.0)
    for span in spans:
        if span.name in seconds:
            seconds[span.name] += span.seconds
    return seconds


_BEGIN, _END = b'{"traceEvents": [', b"\n]}\n"
_STATE, _WORK = 1, 2  # threads of a worker in the trace: one shows its states, one its work


class TraceFile:
    """File in Chrome's trace format, one event per line. The file is valid JSON after every write, even if the run is
    killed. If a power failure damages it, the next write continues after its last complete line. An existing file is
    continued."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers: dict[str, int] = {}

    def write(self, spans: Mapping[str, Sequence[Span]]) -> None:
        """Append the spans of each worker and of the driver, by name. The trace shows each name as a process. Raises
        TraceError."""
        events = [event for name in spans for event in self._introduce(name)]
        events += [_event(span, self._numbers[name]) for name, mine in spans.items() for span in mine]
        if not events:
            return
        with writing(self.path, TraceError):
            self.path.touch()
            with self.path.open("r+b", buffering=0) as file:
                end = _end_of_events(self.path)
                lines = b",\n".join(json.dumps(event).encode() for event in events)
                file.seek(end)
                file.write((b",\n" if end else _BEGIN + b"\n") + lines + _END)
                file.truncate()

    def _introduce(self, name: str) -> list[dict[str, Any]]:
        if name in self._numbers:
            return []
        number = self._numbers[name] = len(self._numbers)
        kinds = {0: ("process_name", name), _STATE: ("thread_name", "state"), _WORK: ("thread_name", "work")}
        return [
            {"ph": "M", "name": kind, "pid": number, "tid": thread, "args": {"name": text}}
            for thread, (kind, text) in kinds.items()
        ]


def _event(span: Span, number: int) -> dict[str, Any]:
    """Return the trace event of a span, in whole microseconds. Start and end are rounded the same way, so that adjacent
    spans do not overlap."""
    start, end = round(span.start * 1e6), round(span.end * 1e6)
    thread = _STATE if span.name in FACTS else _WORK
    where = {"ph": "X", "name": span.name, "pid": number, "tid": thread, "ts": start, "dur": end - start}
    return where | ({"args": span.facts} if span.facts else {})


def _end_of_events(path: Path) -> int:
    """Return the byte position at which the next event is written; 0 in a file without events."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 65536))
        tail = file.read()
    if tail.endswith(_END):
        return size - len(_END)
    return max(0, size - len(tail) + tail.rfind(b",\n")) if b",\n" in tail else 0
