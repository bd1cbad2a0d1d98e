"""Trackers that receive a run's metrics: TensorBoard, Weights & Biases, MLflow and trackio. Each needs an extra
package.

A new tracker is a class with `log` and `close`, and an entry in `tlt.config.registry`."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple, Protocol

from tlt.config import ConfigError
from tlt.config.registry import TRACKERS, maker
from tlt.metrics import leaves, write_json
from tlt_rl import install_hint

_log = logging.getLogger(__name__)
_IDS = "trackers.json"
_PATIENCE = 60.0  # longest time in seconds that a call of a tracker may take at the end of the run


class Tracker(Protocol):
    """Protocol of a tracker. It may also have a method `log_table(step, rows)`, which receives some responses of a step
    as rows of a table. All rows have the same columns."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step. docs/metrics.md explains their names."""
        ...

    def close(self) -> None: ...


class TrackedRun(NamedTuple):
    """Facts about the run whose metrics a tracker receives."""

    folder: Path
    first_step: int
    """first step that will be logged: 0 for a new run. A resumed run logs this step and later steps again if the run
    before it has logged them."""
    config: Mapping[str, Any]


class TensorBoard:
    """Tracker for TensorBoard. It writes event files to tensorboard/ in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def close(self) -> None:
        self.board.close()


class WeightsAndBiases:
    """Tracker for Weights & Biases. The environment variables of wandb set project, entity and mode (WANDB_PROJECT,
    WANDB_MODE=offline, ...). A resumed run continues the same wandb run."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self.wandb = wandb
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tlt"),
            name=run.folder.resolve().name,
            dir=str(run.folder),
            config=dict(run.config),
            id=known_id(run, "wandb"),
            resume="allow",
            settings=wandb.Settings(console="off"),  # otherwise wandb would store every frame of the live display
        )
        remember_id(run, "wandb", self.run.id)
        self.run.define_metric("*", step_metric="step")  # a resumed run repeats steps, but W&B's own step only rises

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"step": step, "completions": table})

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """Tracker for MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME set the server and the experiment. A resumed
    run continues the same MLflow run."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self.mlflow = mlflow
        known = known_id(run, "mlflow")
        if known is None and "MLFLOW_EXPERIMENT_NAME" not in os.environ:
            mlflow.set_experiment("tlt")
        active = mlflow.start_run(run_id=known, run_name=run.folder.resolve().name)
        remember_id(run, "mlflow", active.info.run_id)
        if known is None:
            mlflow.log_params({name: str(value)[:500] for name, value in leaves(run.config, ".")})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self.mlflow.end_run()


class Trackio:
    """Tracker for trackio, with a local database or the Hugging Face Space that TRACKIO_SPACE_ID names. TRACKIO_PROJECT
    names the project (default `tlt`). A resumed run continues the trackio run of the same name, which keeps the earlier
    values of repeated steps too."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self.table, known = trackio.Table, known_id(run, "trackio")
        with redirect_stdout(sys.stderr):  # trackio prints, but stdout is for the run's own lines
            self.run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "tlt"),
                name=known or run.folder.resolve().name,
                config=dict(run.config),
                resume="allow" if known else "never",
            )
        remember_id(run, "trackio", self.run.name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.run.log({"completions": self.table(data=[dict(row) for row in rows])}, step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self.run.finish()


def names_of(trackers: Sequence[str] | None) -> list[str]:
    """Return the names of the trackers to use. `trackers` is run.trackers. If it is None, use TensorBoard if that is
    installed. Raises ConfigError if a tracker is not installed."""
    if trackers is None:
        return ["tensorboard"] if find_spec("tensorboard") else []
    for name in trackers:
        if not find_spec(TRACKERS[name].package):
            raise ConfigError(f"run.trackers names {name}, which is not installed: {install_hint(name)}")
    return list(trackers)


class Trackers:
    """All trackers of a run. They log in a thread of their own, so a slow tracker delays no step. A tracker that fails
    gets no further metrics. The run continues, because metrics.jsonl is complete."""

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        self._open: dict[str, Tracker] = {}
        self._calls = SimpleQueue[Callable[[], Any] | None]()  # None ends the thread
        # one thread, because the active run of MLflow is per thread; a daemon, so that a hanging tracker ends no run
        self._thread = Thread(target=self._make_calls, name="trackers", daemon=True)
        self._thread.start()
        for name in names:
            self._calls.put(partial(self._start, name, run))
        started = Event()
        self._calls.put(started.set)
        started.wait()
        atexit.register(self.close)  # for a run that ends by an error

    def _start(self, name: str, run: TrackedRun) -> None:
        if found := self._guarded(name, lambda: maker(TRACKERS[name])(run)):
            self._open[name] = found

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = dict(scalars(metrics))
        self._for_each(lambda tracker: tracker.log(step, values))

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send a table of responses to the trackers that accept tables."""

        def log(tracker: Tracker) -> None:
            if log_table := getattr(tracker, "log_table", None):
                log_table(step, rows)

        if rows:
            self._for_each(log)

    def close(self) -> None:
        """Close the trackers after they have logged everything. Give up if a call takes more than 60 s."""
        atexit.unregister(self.close)
        self._for_each(lambda tracker: tracker.close())
        self._calls.put(None)
        while self._thread.is_alive():
            left = self._calls.qsize()
            self._thread.join(_PATIENCE)
            if self._thread.is_alive() and self._calls.qsize() == left:
                _log.warning("a tracker did not answer within %g s: it lacks the last metrics", _PATIENCE)
                return

    def _make_calls(self) -> None:
        for call in iter(self._calls.get, None):
            call()

    def _for_each(self, act: Callable[[Tracker], None]) -> None:
        """Let the thread call `act` with each tracker."""

        def call() -> None:
            for name, tracker in list(self._open.items()):
                self._guarded(name, lambda tracker=tracker: act(tracker))

        self._calls.put(call)

    def _guarded(self, name: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except BaseException as error:  # such as a network, service or disk error; some services call sys.exit
            reason = " ".join(str(error).split())[:300]
            _log.warning(
                "the tracker %s failed (%s: %s) and gets no further metrics; the run continues",
                name,
                type(error).__name__,
                reason,
            )
            self._open.pop(name, None)
            return None


def scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, value) for every number in the nested metrics of a step, with names such as `seconds/rollout`.
    Spaces become `_`, because TensorBoard refuses them."""
    for name, value in leaves(metrics, "/"):
        if isinstance(value, int | float) and name != "step":
            yield name.replace(" ", "_"), value


def known_id(run: TrackedRun, name: str) -> str | None:
    """Return the tracker's id of the run that is resumed; None for a new run. `name` is the tracker's name."""
    path = run.folder / _IDS
    return json.loads(path.read_text(encoding="utf-8")).get(name) if run.first_step and path.is_file() else None


def remember_id(run: TrackedRun, name: str, known: str) -> None:
    path = run.folder / _IDS
    ids = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_json(path, ids | {name: known})
