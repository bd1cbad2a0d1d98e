"""Where metrics are shown beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, each an extra of its own.

A new one is a class with `log` and `close`, and its line in `tlt.config.registry`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tlt.config import ConfigError
from tlt.config.registry import TRACKERS, maker
from tlt.metrics import write_json
from tlt_rl import install_hint

_log = logging.getLogger(__name__)
_IDS = "trackers.json"


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a step, by the names of docs/metrics.md."""
        ...

    def close(self) -> None: ...


class Place(NamedTuple):
    """What a tracker is told of the run."""

    folder: Path
    first_step: int
    """0: the run is new; else what was told of this step and later ones is void"""
    config: Mapping[str, Any]


class TensorBoard:
    """Events in the run's folder."""

    def __init__(self, place: Place) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import: only where a run is recorded

        self.board = SummaryWriter(str(place.folder / "tensorboard"), purge_step=place.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def close(self) -> None:
        self.board.close()


class WeightsAndBiases:
    """Project, entity and mode are those of its environment variables (WANDB_PROJECT, WANDB_MODE=offline, ...). A
    resumed run goes on in the same one."""

    def __init__(self, place: Place) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tlt"),
            name=place.folder.resolve().name,
            dir=str(place.folder),
            config=dict(place.config),
            id=known_id(place, "wandb"),
            resume="allow",
            settings=wandb.Settings(console="off"),  # else it would keep every frame of the live view
        )
        remember_id(place, "wandb", self.run.id)
        self.run.define_metric("*", step_metric="step")  # its own count must not fall, as it does after a resume

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """Where MLFLOW_TRACKING_URI says, in the experiment of MLFLOW_EXPERIMENT_NAME. A resumed run goes on in the same
    one."""

    def __init__(self, place: Place) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self.mlflow = mlflow
        known = known_id(place, "mlflow")
        if known is None and "MLFLOW_EXPERIMENT_NAME" not in os.environ:
            mlflow.set_experiment("tlt")
        run = mlflow.start_run(run_id=known, run_name=place.folder.resolve().name)
        remember_id(place, "mlflow", run.info.run_id)
        if known is None:
            mlflow.log_params({name: str(value)[:500] for name, value in _leaves(place.config, ".")})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self.mlflow.end_run()


def names_of(trackers: Sequence[str] | None) -> list[str]:
    """Of `run.trackers`; left out, TensorBoard where it is installed. Raises ConfigError for one that is not."""
    if trackers is None:
        return ["tensorboard"] if find_spec("tensorboard") else []
    for name in trackers:
        if not find_spec(TRACKERS[name].package):
            raise ConfigError(f"run.trackers names {name}, which is not installed: {install_hint(name)}")
    return list(trackers)


class Trackers:
    """All of a run's. One that fails is told no more, and the run goes on: metrics.jsonl has everything."""

    def __init__(self, names: Sequence[str], place: Place) -> None:
        self._open: dict[str, Tracker] = {}
        for name in names:
            if found := self._guarded(name, lambda name=name: maker(TRACKERS[name])(place)):
                self._open[name] = found

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = dict(scalars(metrics))
        for name, tracker in list(self._open.items()):
            self._guarded(name, lambda tracker=tracker: tracker.log(step, values))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.close)
        self._open.clear()

    def _guarded(self, name: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:  # a network, a service, a disk
            said = " ".join(str(error).split())[:300]
            _log.warning("%s failed (%s: %s) and is told no more; the run goes on", name, type(error).__name__, said)
            self._open.pop(name, None)
            return None


def scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of a line of metrics by its name, such as `seconds/rollout`; without spaces, which TensorBoard does
    not take in a tag."""
    for name, value in _leaves(metrics, "/"):
        if isinstance(value, int | float) and name != "step":
            yield name.replace(" ", "_"), value


def _leaves(tree: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, separator, f"{prefix}{name}{separator}")
        else:
            yield prefix + name, value


def known_id(place: Place, name: str) -> str | None:
    """Of the run as the service knows it, where this one goes on with it."""
    path = place.folder / _IDS
    return json.loads(path.read_text(encoding="utf-8")).get(name) if place.first_step and path.is_file() else None


def remember_id(place: Place, name: str, known: str) -> None:
    path = place.folder / _IDS
    ids = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_json(path, ids | {name: known})
