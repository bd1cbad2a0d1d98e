"""Writer of each step's results to metrics.jsonl, to completions.jsonl and to trackers. completions.jsonl has one line
per response: its text, its reward and how it was decoded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tlt.config import Config
from tlt.files import writing
from tlt.loop import StepResult
from tlt.metrics import MetricsError, MetricsWriter
from tlt.rl.measure import tokens_of
from tlt.run.trackers import TrackedRun, Trackers, makers_of
from tlt.types import Group, Response

_LAST = 10  # number of recent steps from which the remaining time is estimated


class Record:
    """Writer of a run's results, step by step. `first_step` is the number of the first step that it writes: 1, or a
    later one if the run is resumed. `last` is the metrics line of the step before it, as saved in the checkpoint."""

    def __init__(self, config: Config, folder: Path, first_step: int, last: dict[str, Any] | None = None) -> None:
        self.metrics = MetricsWriter(folder, first_step, last)
        self.completions = CompletionsWriter(folder, first_step)
        self.trackers = Trackers(makers_of(config), TrackedRun(folder, first_step, config.model_dump(mode="json")))

    def write(self, result: StepResult) -> None:
        """Write the metrics and responses of a step. Raises MetricsError if a file cannot be written."""
        metrics = result.metrics
        self.completions.write(metrics.step, result.completed)
        self.metrics.write(metrics)
        self.trackers.log(metrics.step, asdict(metrics))

    def write_last_evaluation(self, step: int, evaluation: dict[str, float]) -> None:
        """Write the metrics of the evaluation after the last step. `step`: number of the step that would follow."""
        if evaluation:
            self.metrics.write_last_evaluation(step, evaluation)
            self.trackers.log(step, {"eval": evaluation})

    def close(self) -> None:
        self.trackers.close()


class RunProgress:
    """Progress of a run: the number of tokens so far, including those before a resume, and the estimated seconds of the
    remaining steps. `last` is the metrics line of the step before a resume.

    The estimate is the median of the last steps, so that a slow first step does not change it. Work that is done every
    few steps is estimated apart: its mean time by the number of times that it is left to do."""

    def __init__(self, config: Config, last: dict[str, Any] | None = None) -> None:
        self.steps = config.train.steps
        self.tokens_seen: int = (last or {}).get("tokens_seen", 0)
        self._every = {"eval": config.eval.every, "save": config.run.save_every, "compare": config.run.compare_every}
        self._seconds: list[Mapping[str, float]] = []  # those of all steps; the time of a save is added later

    def add(self, result: StepResult) -> None:
        """Add a step, and set `tokens_seen` and `seconds_left` in its metrics."""
        metrics = result.metrics
        self.tokens_seen += tokens_of(result.groups)
        left = self.steps - metrics.step
        self._seconds.append(metrics.seconds)
        metrics.tokens_seen = self.tokens_seen
        metrics.seconds_left = left * median(
            step["total"] - sum(step.get(phase, 0.0) for phase in self._every) for step in self._seconds[-_LAST:]
        )
        for phase, every in self._every.items():
            taken = [step[phase] for step in self._seconds if phase in step]
            if every and taken:
                metrics.seconds_left += fmean(taken) * (left // every)


# -- completions -------------------------------------------------------------------------------------------------------


NAME, OLDER = "completions.jsonl", "completions.old.jsonl"


class CompletionsWriter:
    """Writer of completions.jsonl with a size limit (default 1 GiB). If the file would exceed half of the limit, it is
    first renamed to `completions.old.jsonl`, and replaces an earlier file of that name. When a run is resumed, lines
    of `first_step` and later steps are deleted first."""

    def __init__(self, folder: Path, first_step: int, limit_bytes: int = 2**30) -> None:
        self.path, self.older, self.half = folder / NAME, folder / OLDER, limit_bytes // 2
        for path in (self.older, self.path):
            _cut(path, first_step)

    def write(self, step: int, groups: Iterable[Group]) -> None:
        """Append a line for each response of a step. Raises MetricsError if the file cannot be written."""
        lines = b"".join(_line(step, response) for group in groups for response in group.responses)
        with writing(self.path, MetricsError):
            if self.path.exists() and self.path.stat().st_size + len(lines) > self.half:
                self.path.replace(self.older)
            with self.path.open("ab") as file:
                file.write(lines)


def _line(step: int, response: Response) -> bytes:
    line = {"step": step} | record(response)
    # lone surrogates cannot be encoded as UTF-8 and become JSON escapes
    return json.dumps(line, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"


def record(response: Response) -> dict[str, Any]:
    """Return a response as a dictionary for completions.jsonl. docs/metrics.md explains its fields."""
    request = response.request
    return {
        "prompt_id": request.prompt.prompt_id,
        "epoch": request.epoch,
        "index": request.index,
        "task": request.prompt.task,
        "prompt": request.prompt.text,
        "response": response.text,
        "answer": request.prompt.ground_truth,
        "extracted_answer": response.answer,
        "reward": response.reward,
        "scores": response.scores,
        "outcome": response.outcome,
        "advantage": response.advantage,
        "length": response.num_sampled,
        "finish_reason": response.finish_reason,
        "replies": [reply.text for reply in response.replies],
        "decoded": vars(response.decoded),
        "proposed": runs_of(response.proposed),
    }


def runs_of(proposed: str) -> str:
    """Return a text with one letter per token in run-length encoding: `sss..a` becomes `3s2.1a`."""
    return "".join(f"{len(list(run))}{letter}" for letter, run in groupby(proposed))


def _cut(path: Path, first_step: int) -> None:
    """Delete the lines of `first_step` and later steps from a file, and the incomplete last line of a killed run."""
    if not path.is_file():
        return
    kept = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n") or _step(line) >= first_step:
                break
            kept += len(line)
        file.truncate(kept)
    if not kept:
        path.unlink()


def _step(line: bytes) -> float:
    """Return the step of a line; infinity if it cannot be parsed, so that it and all later lines are deleted."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return float("inf")
