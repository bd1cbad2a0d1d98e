"""Python imports this in every process of a run whose PYTHONPATH begins with this folder. It stands at some points of
the program, and strikes the process that comes to the one that is armed, once.

$TLT_FAULTS/armed.json says what happens where; it may be written at any time, and is renamed to struck.json by the
process that it strikes, which writes its number there:

    at      the points that the thread is within, the innermost last: these and no others
    call    of these, the one that is struck
    during  the points that the driver is within meanwhile, if that matters
    how     SIGKILL, SIGSTOP, exception, out of memory, disk full

Training of the drafter goes on in every other idle moment, and there are many candidates, each of which is published: a
short run would not come to that. In the others workers decode ahead.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

POINTS = {
    "tlt.cluster.run_worker": (
        *(f"RunWorker.{method}" for method in ("decode", "look_ahead", "train_drafter", "evaluate_drafter")),
        *(f"RunWorker.{method}" for method in ("take_drafter", "update", "rollback", "sync", "save")),
        *(f"RunWorker.{method}" for method in ("state", "take_state")),
        "take_weights",
    ),
    "tlt.engine.engine": ("Engine.round", "Engine.draft_with"),
    "tlt.spot.spot": ("SpotTrainer.evaluate",),
    "tlt.spot.trainer": ("DrafterTrainer.step",),
    "tlt.rl.parallel": ("Processes.sum_shards",),
    "tlt.rl.policy": ("save_file",),
    "tlt.cluster.coordinator": ("Coordinator.sync", "Allocation.handle_slice"),
    "tlt.cluster.remote": ("ClusterPolicy.read_progress",),
    "tlt.cluster.idle": ("ComingRequests.add_slice",),
    "tlt.spot.schedule": ("Schedule.trained", "Schedule.publishes"),
    "tlt.spot.saving": ("flush",),
    "tlt.store.checkpoint": ("flush",),
    "tlt.run.train": ("_evaluate",),
    "tiny_rewards": ("share_of_low_bytes",),
}
"""module -> functions and methods in it, which are called there"""
_OF_THE_DRIVER = ("tlt.run.train:_evaluate",)
"""which the other processes are to know of"""
_HOME = os.environ.get("TLT_FAULTS", "")


class Place(threading.local):
    """Of a thread: the points that it is within."""

    def __init__(self) -> None:
        self.points: list[str] = []


class Armed:
    """The fault that is to come, as of the file that says so."""

    def __init__(self) -> None:
        self._read_at, self._fault, self._calls = 0, dict[str, Any](), 0
        self._lock = threading.Lock()
        self._path = os.path.join(_HOME, "armed.json")

    def arrive(self, points: Sequence[str]) -> None:
        try:
            written = os.stat(self._path).st_mtime_ns
        except OSError:
            return
        with self._lock:
            if written != self._read_at:
                with suppress(OSError, ValueError), open(self._path, encoding="utf-8") as file:
                    self._fault, self._read_at, self._calls = json.load(file), written, 0
            if self._fault.get("at") != list(points) or not _driver_is_at(self._fault["during"]):
                return
            self._calls += 1
            if self._calls < self._fault["call"] or not self._is_ours():
                return
        strike(self._fault["how"], self._fault["fill"])

    def _is_ours(self) -> bool:
        """Of several processes that come to the point at once, the fault is one's."""
        struck = os.path.join(_HOME, "struck.json")
        try:
            os.rename(self._path, f"{struck}.partial")
        except OSError:
            return False
        with open(f"{struck}.partial", "w", encoding="utf-8") as file:
            json.dump({"pid": os.getpid()}, file)
        os.rename(f"{struck}.partial", struck)
        return True


class Struck(Exception):
    """One that is hard to send to another process, as it cannot be made again from its message."""

    def __init__(self, message: str, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


def strike(how: str, fill: str) -> None:
    if how in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), signal.Signals[how])
    elif how == "exception":
        raise Struck("struck", os.getpid())
    elif how == "out of memory":
        torch = sys.modules.get("torch")
        bytearray(1 << 60) if torch is None else torch.empty(1 << 60, dtype=torch.uint8)
    elif how == "disk full":
        with suppress(OSError), open(fill, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))


def _driver_is_at(points: Sequence[str]) -> bool:
    return all(os.path.exists(os.path.join(_HOME, point)) for point in points)


@contextmanager
def _reported_to_others(point: str) -> Iterator[None]:
    path = os.path.join(_HOME, point)
    if point in _OF_THE_DRIVER:
        open(path, "w").close()
    try:
        yield
    finally:
        if point in _OF_THE_DRIVER:
            os.unlink(path)


_place, _armed = Place(), Armed()


def _pointed(call: Callable[..., Any], point: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*arguments: Any, **options: Any) -> Any:
        points = _place.points
        points.append(point)
        try:
            with _reported_to_others(point):
                _armed.arrive(points)
                return call(*arguments, **options)
        finally:
            points.pop()

    return called


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__name__ == "tlt.spot.schedule":
            _hurry(module)
        for name in POINTS.get(module.__name__, ()):
            owner_name, _, own = name.rpartition(".")
            owner = getattr(module, owner_name) if owner_name else module
            setattr(owner, own, _pointed(getattr(owner, own), f"{module.__name__}:{name}"))


def _hurry(schedule: ModuleType) -> None:
    """Let something be due in every other idle moment, and publish each candidate."""
    object.__setattr__(schedule.RULE, "stretch", 4)
    due, turns = schedule.Schedule.due, itertools.cycle((True, False))
    schedule.Schedule.due = lambda self: due(self) if next(turns) else None
    schedule.Schedule.publishes = lambda self, whole: whole.entries > 0


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in POINTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader)
        return spec


if _HOME:
    sys.meta_path.insert(0, _Finder())
