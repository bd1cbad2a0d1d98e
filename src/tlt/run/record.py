"""Writer of each step's results to metrics.jsonl, to completions.jsonl and to trackers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tlt.config import Config
from tlt.loop import StepResult
from tlt.metrics import MetricsWriter
from tlt.rl.measure import tokens_of
from tlt.run.trackers import TrackedRun, Trackers, makers_of
from tlt.store.completions import CompletionsWriter

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
