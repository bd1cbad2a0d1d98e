"""Reader of a run's files for report.html. If a file is missing or damaged, the page says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nlargest
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from tlt.files import parse_json, read_json
from tlt.metrics import leaves

FILES = ("metrics.jsonl", "summary.json", "config.json", "completions.jsonl", "completions", "trace.json")

_TAIL_TRACE, _TAIL_COMPLETIONS = 24 * 2**20, 12 * 2**20  # number of bytes that are read from the end of the file
_MOST_TIMELINES, _MOST_SPANS = 12, 6000
_WORDS = {"ahead": "look-ahead", "spot": "drafter training", "early": "early update"}  # span -> its name on the page


class TimelineSpan(NamedTuple):
    """Time span in the timeline of one step, such as the rollout of a worker."""

    name: str
    process: int
    """process of the span: 0 is the driver, n is worker n - 1"""
    is_state: bool
    """whether the span is a state of a worker, such as rollout or idle"""
    start: float
    """start of the span, in seconds since the step began"""
    seconds: float


@dataclass
class RunData:
    """Data of a run for its page. `steps` are the lines of metrics.jsonl without prompts, workers and memory."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    completions: list[dict[str, Any]] = field(default_factory=list)
    timelines: dict[int, list[TimelineSpan]] = field(default_factory=dict)
    """step -> time spans in that step, for at most about a dozen steps"""
    states: Counter[str] = field(default_factory=Counter)
    """state of a worker -> seconds in it, summed over all workers and steps"""
    useful_seconds: float = 0.0
    """seconds of useful work, summed over all workers and steps, as `metrics.useful_share` defines it"""
    workers: int = 0
    replayed: int = 0
    """number of times that a prompt was used again in the same epoch"""
    driver_starts: int = 0
    """number of starts of the driver process in the part of trace.json that was read"""
    worker_starts: int = 0
    faults: list[str] = field(default_factory=list)
    """one sentence for each missing or damaged file of the run"""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def missing_steps(self) -> int:
        return self.steps[-1]["step"] + 1 - len(self.steps) if self.steps else 0

    @cached_property
    def columns(self) -> dict[str, dict[int, float]]:
        """Path of a metric in metrics.jsonl, such as `seconds/rollout` -> step -> number."""
        found: dict[str, dict[int, float]] = {}
        for step in self.steps:
            for path, value in leaves(step, "/"):
                if isinstance(value, (int, float)) and isfinite(value):
                    found.setdefault(path, {})[step["step"]] = value
        return found

    def column(self, path: str) -> dict[int, float]:
        return self.columns.get(path, {})

    def total(self, path: str) -> float:
        return sum(self.column(path).values())


def read_run(folder: Path) -> RunData:
    run = RunData(folder)
    run.config, run.summary = _object(run, "config.json"), _object(run, "summary.json")
    _read_metrics(run)
    parquet = sorted(folder.glob("completions/step_*.parquet"))
    # a resumed run may have changed the format
    run.completions = (_parquet_rows(run, parquet) if parquet else []) + _json_rows(run, required=not parquet)
    _read_trace(run)
    for path in folder.glob("worker_*.log"):
        with _reading(run, path.name):
            log = path.read_bytes() if path.stat().st_size < _TAIL_TRACE else b""
            run.worker_starts += log.count(b": here is worker ")
    return run


@contextmanager
def _reading(run: RunData, name: str) -> Iterator[None]:
    """Report in `run.faults` that a file cannot be read or is damaged, if the block raises OSError or ValueError."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None  # None in errors of pyarrow
        run.faults.append(f"{name} cannot be read ({why})." if why else f"{name} is damaged.")


def _object(run: RunData, name: str) -> dict[str, Any]:
    found, path = dict[str, Any](), run.folder / name
    if not path.exists():
        run.faults.append(f"{name} is missing{' because the run has not ended' * (name == 'summary.json')}.")
        return found
    with _reading(run, name):
        found = read_json(path)
    return found


def _lines(run: RunData, name: str, size: int = 2**63) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line in the last `size` bytes of a file. A line that cannot be parsed, such as the
    incomplete last line of a killed run, is skipped and reported in `run.faults`."""
    path, damaged = run.folder / name, 0
    if not path.is_file():
        run.faults.append(f"{name} is missing.")
        return
    with _reading(run, name), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        if file.tell():
            file.readline()  # skip the rest of a line that begins before these bytes
        for line in file:
            if line.rstrip() not in (b'{"traceEvents": [', b"]}", b""):  # first and last line of trace.json
                try:
                    yield parse_json(line.rstrip(b",\n"))
                except ValueError:
                    damaged += 1
    if damaged:
        run.faults.append(f"{name} has {damaged} damaged line(s), which this page leaves out.")


def _read_metrics(run: RunData) -> None:
    seen: set[tuple[int, ...]] = set()
    for line in _lines(run, "metrics.jsonl"):
        for prompt in map(tuple, line.pop("prompts", ())):
            run.replayed += prompt in seen
            seen.add(prompt)
        workers, _ = line.pop("workers", []), line.pop("memory", None)
        run.workers = max(run.workers, len(workers))
        for worker in workers:
            run.states.update(worker)
            run.useful_seconds += line.get("useful_share", 0.0) * sum(worker.values())
        run.steps.append(line)
    if not run.steps:
        run.faults.append("No step has ended yet.")


def _json_rows(run: RunData, required: bool) -> list[dict[str, Any]]:
    names = [name for name in ("completions.old.jsonl", "completions.jsonl") if (run.folder / name).is_file()]
    names = names or ["completions.jsonl"] * required
    return [row for name in names for row in _lines(run, name, _TAIL_COMPLETIONS)]


def _parquet_rows(run: RunData, paths: list[Path]) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        run.faults.append("The completions are Parquet files, which need pyarrow: pip install 'tlt-rl[data]'.")
        return []
    found: list[dict[str, Any]] = []
    size = 0
    for path in reversed(paths):
        with _reading(run, f"completions/{path.name}"):
            size += path.stat().st_size
            if size > _TAIL_COMPLETIONS // 4 and found:  # a quarter, because Parquet is compressed
                break
            found = parquet.read_table(path).to_pylist() + found
    return [row | {"scores": dict(row["scores"])} for row in found]


def _read_trace(run: RunData) -> None:
    events = list(_lines(run, "trace.json", _TAIL_TRACE))
    spans = [event for event in events if event["ph"] == "X"]
    run.driver_starts = sum(event["name"] == "process_name" and event["pid"] == 0 for event in events)
    # a step begins when the step before it ended
    ends = {span["args"]["step"]: span["ts"] for span in spans if span["name"] == "step ends"}
    starts = {-1: min((span["ts"] for span in spans if span["pid"] == 0), default=0)} | ends
    windows = {step: (starts[step - 1], end) for step, end in ends.items() if starts.get(step - 1, end) < end}
    slowest = nlargest(2, windows, key=lambda step: windows[step][1] - windows[step][0])
    spread = sorted(windows)
    stride = -(-len(spread) // (_MOST_TIMELINES - 2)) or 1
    for step in sorted({*slowest, *spread[::stride], *spread[-1:]}):
        start, end = windows[step]
        inside = [span for span in spans if start <= span["ts"] < end and span["dur"] > 0]
        longest = nlargest(_MOST_SPANS, inside, key=lambda span: span["dur"])
        run.timelines[step] = [
            TimelineSpan(
                _word(span["name"]), span["pid"], span["tid"] == 1, (span["ts"] - start) / 1e6, span["dur"] / 1e6
            )
            for span in sorted(longest, key=lambda span: span["ts"])
        ]


def _word(name: str) -> str:
    return _WORDS.get(name.lower(), name.lower())
