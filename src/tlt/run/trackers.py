"""Trackers that receive a run's metrics: TensorBoard, Weights & Biases, and the user's own (docs/metrics.md)."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple, Protocol

from tlt.config import Config, ConfigError
from tlt.config.registry import TRACKERS, maker
from tlt.files import read_json
from tlt.metrics import leaves, write_json
from tlt.rewards.scores import imported
from tlt_rl import install_hint

_log = logging.getLogger(__name__)
_IDS = "trackers.json"
_PATIENCE = 60.0  # longest time in seconds that a call of a tracker may take at the end of the run


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step. docs/metrics.md explains their names."""
        ...

    def close(self) -> None: ...


class TrackedRun(NamedTuple):
    """Facts about the run whose metrics a tracker receives."""

    folder: Path
    first_step: int
    """number of the first step that will be logged: 1 for a new run. A resumed run logs this step and later steps again
    if the run before it has logged them."""
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

        ids = run.folder / _IDS
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tlt"),
            name=run.folder.resolve().name,
            dir=str(run.folder),
            config=dict(run.config),
            id=read_json(ids)["wandb"] if run.first_step > 1 and ids.is_file() else None,
            resume="allow",
            settings=wandb.Settings(console="off"),  # otherwise wandb would store every frame of the live display
        )
        write_json(ids, {"wandb": self.run.id})
        self.run.define_metric("*", step_metric="step")  # a resumed run repeats steps, but W&B's own step only rises

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


def names_of(trackers: Sequence[str] | None) -> list[str]:
    """Return the names of the trackers to use. `trackers` is run.trackers. If it is None, use TensorBoard if that is
    installed. Raises ConfigError if a tracker is not installed."""
    if trackers is None:
        return ["tensorboard"] if find_spec("tensorboard") else []
    for name in trackers:
        if name in TRACKERS and not find_spec(TRACKERS[name].package):
            raise ConfigError(f"run.trackers names {name}, which is not installed: {install_hint(name)}")
    return list(trackers)


def makers_of(config: Config) -> dict[str, Callable[[TrackedRun], Tracker]]:
    """Return the class of each tracker by its name. Raises ConfigError if a tracker is not installed, and RewardError
    if the user's class cannot be imported."""
    found = {}
    for name in names_of(config.run.trackers):
        mine = name not in TRACKERS
        of_user = imported(name, config.reward.folder, "run.trackers", "module:Class") if mine else None
        found[name] = of_user or maker(TRACKERS[name])
    return found


class Trackers:
    """All trackers of a run. They log in a thread of their own, so a slow tracker delays no step. A tracker that fails
    gets no further metrics. The run continues, because metrics.jsonl is complete."""

    def __init__(self, makers: Mapping[str, Callable[[TrackedRun], Tracker]], run: TrackedRun) -> None:
        self._open: dict[str, Tracker] = {}
        self._calls = SimpleQueue[Callable[[], Any] | None]()  # None ends the thread
        # one thread, because some trackers have one run per thread; a daemon, so that a hanging tracker ends no run
        self._thread = Thread(target=self._make_calls, name="trackers", daemon=True)
        self._thread.start()
        for name, make in makers.items():
            self._calls.put(partial(self._start, name, make, run))
        started = Event()
        self._calls.put(started.set)
        started.wait()
        atexit.register(self.close)  # for a run that ends by an error

    def _start(self, name: str, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        if found := self._guarded(name, lambda: make(run)):
            self._open[name] = found

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = dict(scalars(metrics))
        self._for_each(lambda tracker: tracker.log(step, values))

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
