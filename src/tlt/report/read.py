"""Reader of a run's files for report.html. If a file is missing, cut off or damaged, the page says so."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FILES = ("metrics.jsonl", "summary.json", "config.json", "completions.jsonl", "completions", "trace.json")

_TAIL_TRACE, _TAIL_COMPLETIONS = 24 * 2**20, 12 * 2**20  # bytes read from the end
_MOST_TIMELINES, _MOST_SPANS = 12, 6000
_DROPPED = ("prompts", "memory", "rewards", "workers")  # of a line of metrics, once they are summed


class Span(NamedTuple):
    name: str
    process: int
    """0: the driver; n: worker n - 1"""
    is_state: bool
    start: float
    """Seconds since the step began."""
    seconds: float


@dataclass
class Run:
    """Data of a run for its page. `steps` are the lines of metrics.jsonl without the fields in `_DROPPED`."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    completions: list[dict[str, Any]] = field(default_factory=list)
    timelines: dict[int, list[Span]] = field(default_factory=dict)
    states: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Worker seconds by state, over all steps."""
    useful_seconds: float = 0.0
    """Worker seconds that the run could not do without; see `metrics.useful_share`."""
    workers: int = 0
    replayed: int = 0
    """Prompts that two steps consumed in one epoch."""
    missing_steps: int = 0
    driver_starts: int = 0
    """Starts of the driver in the part of trace.json that was read."""
    worker_starts: int = 0
    faults: list[str] = field(default_factory=list)
    """One sentence for each file that is missing or damaged."""
    _columns: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def column(self, path: str) -> list[float | None]:
        """Return one number a step, such as that of `seconds/rollout`; None where a step has none."""
        if path not in self._columns:
            self._columns[path] = [number(step, path) for step in self.steps]
        return self._columns[path]

    def total(self, path: str) -> float:
        return sum(value for value in self.column(path) if value is not None)


def number(tree: Any, path: str) -> float | None:
    """Return the number at a path such as `seconds/rollout`, or None."""
    for name in path.split("/"):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree if isinstance(tree, (int, float)) and not isinstance(tree, bool) else None


def read_run(folder: Path) -> Run:
    run = Run(folder)
    run.config = _read_object(run, "config.json")
    run.summary = _read_object(run, "summary.json")
    _read_metrics(run)
    run.completions = _read_completions(run)
    _read_trace(run)
    logs = [path.read_bytes() for path in folder.glob("worker_*.log") if path.stat().st_size < _TAIL_TRACE]
    run.worker_starts = sum(log.count(b": here is worker ") for log in logs)
    return run


def _read_object(run: Run, name: str) -> dict[str, Any]:
    path = run.folder / name
    if not path.is_file():
        unfinished = " because the run has not ended" if name == "summary.json" else ""
        run.faults.append(f"{name} is missing{unfinished}.")
        return {}
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        run.faults.append(f"{name} is damaged.")
        return {}
    return tree


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line, or None for a line that holds none."""
    for line in lines:
        try:
            tree = json.loads(line.strip().rstrip(b","))
        except (ValueError, RecursionError):
            tree = None
        yield tree if isinstance(tree, dict) else None


# -- metrics.jsonl -----------------------------------------------------------------------------------------------------


def _read_metrics(run: Run) -> None:
    path, damaged = run.folder / "metrics.jsonl", 0
    if not path.is_file():
        run.faults.append("metrics.jsonl is missing.")
        return
    epochs: dict[int, set[int]] = {}
    with path.open("rb") as file:
        for line in _objects(file):
            if line is None or not isinstance(line.get("step"), int):
                damaged += 1
                continue
            _count_prompts(run, line.get("prompts"), epochs)
            _count_workers(run, line.get("workers"), number(line, "useful_share") or 0.0)
            run.steps.append({key: value for key, value in line.items() if key not in _DROPPED})
    if damaged:
        run.faults.append(f"metrics.jsonl has {damaged} damaged line(s), which this page leaves out.")
    if not run.steps:
        run.faults.append("No step has ended yet.")
    known = {step["step"] for step in run.steps}
    run.missing_steps = max(known, default=-1) + 1 - len(known)


def _count_prompts(run: Run, prompts: Any, epochs: dict[int, set[int]]) -> None:
    for pair in prompts if isinstance(prompts, list) else ():
        if isinstance(pair, list) and len(pair) == 2:
            row, epoch = pair
            seen = epochs.setdefault(epoch, set())
            run.replayed += row in seen
            seen.add(row)
            epochs.pop(epoch - 2, None)  # of older epochs no prompt comes again


def _count_workers(run: Run, workers: Any, useful_share: float) -> None:
    workers = [worker for worker in workers if isinstance(worker, dict)] if isinstance(workers, list) else []
    run.workers = max(run.workers, len(workers))
    states = run.states
    for worker in workers:
        for state, spent in worker.items():
            if isinstance(spent, (int, float)):
                states[state] += spent
                run.useful_seconds += useful_share * spent


# -- completions -------------------------------------------------------------------------------------------------------


def _read_completions(run: Run) -> list[dict[str, Any]]:
    """Return the newest responses, up to a few MiB."""
    parquet = sorted((run.folder / "completions").glob("step_*.parquet"))
    if parquet:
        return _read_parquet(run, parquet)
    found: list[dict[str, Any]] = []
    for name in ("completions.old.jsonl", "completions.jsonl"):
        if (run.folder / name).is_file():
            found += [line for line in _objects(_last_lines(run.folder / name, _TAIL_COMPLETIONS)) if line]
    if not found:
        run.faults.append("There are no completions.")
    return [line for line in found if isinstance(line.get("step"), int)]


def _read_parquet(run: Run, paths: list[Path]) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        run.faults.append("The completions are Parquet files, which need pyarrow: pip install 'tlt-rl[parquet]'.")
        return []
    found: list[dict[str, Any]] = []
    size = 0
    for path in reversed(paths):
        size += path.stat().st_size
        if size > _TAIL_COMPLETIONS // 4 and found:  # Parquet is compressed
            break
        try:
            rows = parquet.read_table(path).to_pylist()
        except Exception:
            run.faults.append(f"completions/{path.name} is damaged.")
            continue
        found = [row | {"scores": dict(row.get("scores") or ())} for row in rows] + found
    return found


def _last_lines(path: Path, size: int) -> list[bytes]:
    """Return the whole lines among the last bytes of a file."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, 2) - size)
        file.seek(start)
        lines = file.read().split(b"\n")
    return [line for line in lines[1 if start else 0 :] if line.strip()]


# -- trace.json --------------------------------------------------------------------------------------------------------

_EVENT = re.compile(rb'^\{"ph": "X"')


def _read_trace(run: Run) -> None:
    path = run.folder / "trace.json"
    if not path.is_file():
        run.faults.append("trace.json is missing.")
        return
    lines = _last_lines(path, _TAIL_TRACE)
    run.driver_starts = sum(b'"process_name"' in line and b'"driver"' in line for line in lines)
    events = [event for event in _objects(line for line in lines if _EVENT.match(line)) if event and _is_whole(event)]
    ends = {
        event["args"]["step"]: event["ts"]
        for event in events
        if event["name"] == "step ends" and isinstance(number(event, "args/step"), int)
    }
    windows = _windows(ends, min((event["ts"] for event in events if event["pid"] == 0), default=0.0))
    chosen = sorted(windows, key=lambda step: windows[step][1] - windows[step][0])[-2:]  # the slowest ones
    spread = sorted(windows)
    stride = max(1, -(-len(spread) // (_MOST_TIMELINES - 2)))
    chosen = sorted({*chosen, *spread[::stride], *spread[-1:]})
    events.sort(key=lambda event: event["ts"])
    for step in chosen:
        start, end = windows[step]
        first, last = (bisect_left(events, at, key=lambda event: event["ts"]) for at in (start, end))
        run.timelines[step] = _spans(events[first:last], start)


def _is_whole(event: Mapping[str, Any]) -> bool:
    numbers = (event.get(key) for key in ("pid", "tid", "ts", "dur"))
    return isinstance(event.get("name"), str) and all(isinstance(value, int | float) for value in numbers)


def _windows(ends: Mapping[int, float], first: float) -> dict[int, tuple[float, float]]:
    """Return when each step began and ended. A step begins where the one before ended."""
    found: dict[int, tuple[float, float]] = {}
    for step, end in ends.items():
        start = ends.get(step - 1, first if step == 0 else None)
        if start is not None and start < end:
            found[step] = (start, end)
    return found


def _spans(events: Iterable[Mapping[str, Any]], start: float) -> list[Span]:
    """Return the longest spans of a step, in the order of time."""
    inside = sorted((event for event in events if event["dur"] > 0), key=lambda event: -event["dur"])
    return sorted(
        (
            Span(event["name"], event["pid"], event["tid"] == 1, (event["ts"] - start) / 1e6, event["dur"] / 1e6)
            for event in inside[:_MOST_SPANS]
        ),
        key=lambda span: span.start,
    )
