"""Reader of a run's files for report.html. If a file is missing or damaged, the page says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from tlt.files import parse_json, read_json
from tlt.metrics import LAST_EVALUATION, leaves

FILES = ("metrics.jsonl", "summary.json", "config.json")


@dataclass
class RunData:
    """Data of a run for its page. `steps` are the lines of metrics.jsonl without prompts, workers and memory."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    """evaluation after the last step: `step` (the number of steps) and `eval`"""
    states: Counter[str] = field(default_factory=Counter)
    """state of a worker -> seconds in it, summed over all workers and steps"""
    useful_seconds: float = 0.0
    """seconds of useful work, summed over all workers and steps, as `metrics.useful_share` defines it"""
    workers: int = 0
    replayed: int = 0
    """number of times that a prompt was used again in the same epoch"""
    faults: list[str] = field(default_factory=list)
    """one sentence for each missing or damaged file of the run"""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def missing_steps(self) -> int:
        return self.steps[-1]["step"] - len(self.steps) if self.steps else 0

    @cached_property
    def columns(self) -> dict[str, dict[int, float]]:
        """Path of a metric in metrics.jsonl, such as `seconds/rollout` -> step -> number."""
        found: dict[str, dict[int, float]] = {}
        for step in [*self.steps, *([self.last_evaluation] if self.last_evaluation else [])]:
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
    return run


@contextmanager
def _reading(run: RunData, name: str) -> Iterator[None]:
    """Report in `run.faults` that a file cannot be read or is damaged, if the block raises OSError or ValueError."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        run.faults.append(f"{name} cannot be read ({why})." if why else f"{name} is damaged.")


def _object(run: RunData, name: str) -> dict[str, Any]:
    found, path = dict[str, Any](), run.folder / name
    if not path.exists():
        run.faults.append(f"{name} is missing{' because the run has not ended' * (name == 'summary.json')}.")
        return found
    with _reading(run, name):
        found = read_json(path)
    return found


def _lines(run: RunData, name: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line of a file. A line that cannot be parsed, such as the incomplete last line of a
    killed run, is skipped and reported in `run.faults`."""
    path, damaged = run.folder / name, 0
    if not path.is_file():
        run.faults.append(f"{name} is missing.")
        return
    with _reading(run, name), path.open("rb") as file:
        for line in file:
            try:
                yield parse_json(line)
            except ValueError:
                damaged += 1
    if damaged:
        run.faults.append(f"{name} has {damaged} damaged line(s), which this page leaves out.")


def _read_metrics(run: RunData) -> None:
    seen: set[tuple[int, ...]] = set()
    for line in _lines(run, "metrics.jsonl"):
        if line.keys() == LAST_EVALUATION:
            run.last_evaluation = line
            continue
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
