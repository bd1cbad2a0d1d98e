"""Runs the tests' tiny model with two workers, in real processes, and disturbs the run by faults at a moment or at a
point of the program (`Cell`), where `faults/sitecustomize.py` strikes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from recovery import ROOT, WAYS, write_recipe

from tlt.cluster.sweeper import MARK

USUAL = "whole weights"
PATIENCE = 4.0  # seconds: cluster.patience
_GONE_WITHIN = 20.0  # seconds for all processes and folders of an ended run to go
_HOOKS = ROOT / "bench" / "faults"
_WORKER, _COORDINATOR = "tlt.cluster.run_worker:RunWorker.", "tlt.cluster.coordinator:Coordinator."
_ALLOCATION = "tlt.cluster.coordinator:Allocation."
_EVALUATION = "tlt.run.train:_evaluate"


def recipe_of(
    home: Path, way: str, steps: int, buffer_tokens: int = 200_000, dtype: str = "float64", **kept: int
) -> Path:
    """A recipe whose rollouts have a long tail for their size, so that one worker is often idle, and whose drafter is
    small enough to be trained then. `kept`: bounds in tokens, for [speculation]."""
    training = {"micro_batch_tokens": 32, "unroll": 2, "learning_rate": 1e-2, "buffer_tokens": buffer_tokens}
    held_out = home / "held_out.jsonl"
    held_out.write_text('{"question": "and?", "answer": "a"}\n{"question": "or?", "answer": "o"}\n', encoding="utf-8")
    reward = {"name": "tiny_rewards:share_of_low_bytes", "folder": str(ROOT / "tests"), "timeout_seconds": 2.0}
    return write_recipe(
        home,
        model={"dtype": dtype},
        rollout={
            "prompts_per_step": 2,
            "group_size": 3,
            "max_new_tokens": 64,
            "stop_strings": list("abcdefghijklm "),
        },
        speculation={"drafter": "adaptive", "window": 32, "training": training} | kept,
        train={"steps": steps, "updates_per_step": 2, "learning_rate": 1e-3, "micro_batch_tokens": 256} | WAYS[way],
        cluster={"workers": 2, "slice_seconds": 0.02, "patience": PATIENCE},
        eval={"every": 4, "samples": 1, "path": str(held_out)},
        run={"folder": str(home / "run"), "save_every": 4, "keep": 2},
        reward=reward,
    )


class Cell(NamedTuple):
    """A fault that strikes at a point of the program."""

    role: str
    phase: str
    fault: str
    at: tuple[str, ...]
    """functions that the thread must be in, the innermost last"""
    call: int = 1
    """which call of the innermost one, since the fault was armed"""
    during: tuple[str, ...] = ()
    """functions that the driver must be in"""
    first: str = ""
    """phase in which another worker gets SIGKILL first, which leads to this point"""

    @property
    def name(self) -> str:
        return f"{self.role}, {self.phase}, {self.fault}"

    @property
    def is_on_record(self) -> bool:
        """Whether it may leave a response without a reward, which is recorded and leads to another policy."""
        return self.role == "reward" and self.fault != "SIGKILL" and not self.during and self.fault != "disk full"

    @property
    def lets_go(self) -> bool:
        """Whether it ends only the drafter's training, which a resumed run has again."""
        drafter = {"worker": _LEARNS_AT, "driver": ("spot", "publication")}.get(self.role, ())
        return self.fault in ("exception", "out of memory") and self.phase in drafter


_PHASES: dict[str, dict[str, dict[str, Any]]] = {
    "worker": {
        "decode": {"at": (f"{_WORKER}decode", "tlt.engine.engine:Engine.round"), "call": 5},
        "look-ahead": {"at": (f"{_WORKER}look_ahead", "tlt.engine.engine:Engine.round"), "call": 3},
        "update": {"at": (f"{_WORKER}update", "tlt.rl.parallel:Processes.sum_shards"), "call": 3},
        "sync": {"at": (f"{_WORKER}sync", "tlt.cluster.run_worker:take_weights")},
        "save": {"at": (f"{_WORKER}save", "tlt.rl.policy:save_file")},
        "evaluation": {"at": (f"{_WORKER}decode", "tlt.engine.engine:Engine.round"), "during": (_EVALUATION,)},
        "rollback": {"at": (f"{_WORKER}rollback",), "first": "update"},
        "gives its state": {"at": (f"{_WORKER}state",), "first": "decode"},
        "comes up": {"at": (f"{_WORKER}take_state",), "first": "decode"},
        "spot": {"at": (f"{_WORKER}train_drafter", "tlt.spot.trainer:DrafterTrainer.step"), "call": 3},
        "judgement": {"at": (f"{_WORKER}evaluate_drafter", "tlt.spot.spot:SpotTrainer.evaluate")},
        "publication": {"at": (f"{_WORKER}take_drafter", "tlt.engine.engine:Engine.draft_with")},
    },
    "driver": {
        "decode": {"at": (f"{_ALLOCATION}handle_slice",), "call": 3},
        "look-ahead": {"at": ("tlt.cluster.idle:ComingRequests.add_slice",)},
        "update": {"at": ("tlt.cluster.remote:ClusterPolicy.read_progress",)},
        "sync": {"at": (f"{_COORDINATOR}sync",)},
        "save": {"at": ("tlt.store.checkpoint:flush",), "call": 2},
        "evaluation": {"at": (_EVALUATION, f"{_ALLOCATION}handle_slice")},
        "saving a drafter": {"at": ("tlt.spot.saving:flush",)},
        "spot": {"at": ("tlt.spot.schedule:Schedule.trained",), "call": 3},
        "publication": {"at": ("tlt.spot.schedule:Schedule.publishes",)},
    },
    "reward": {
        "evaluation": {"at": ("tiny_rewards:share_of_low_bytes",), "during": (_EVALUATION,)},
        "decode": {"at": ("tiny_rewards:share_of_low_bytes",)},
    },
}
_LEARNS_AT = ("spot", "judgement", "publication")
_FAULTS = ("SIGKILL", "SIGSTOP", "exception", "out of memory", "disk full")
_WRITES = {"worker": ("save",), "driver": tuple(_PHASES["driver"]), "reward": ("decode",)}
"""phases that write, so that a full disk is met there"""
CELLS = tuple(
    Cell(role, phase, fault, **place)
    for role, phases in _PHASES.items()
    for fault in _FAULTS
    for phase, place in phases.items()
    if fault != "disk full" or phase in _WRITES[role]
)


@dataclass
class DisturbedRun:
    """A run in processes of its own, which can be started again after its end. `folder` may be on a small disk, which a
    fault fills."""

    recipe: Path
    folder: Path
    options: tuple[str, ...] = ()
    left_behind: list[str] = field(default_factory=list)
    """what processes that ended left behind"""

    def __post_init__(self) -> None:
        self._faults = self.recipe.parent / f"{self.folder.name}.faults"
        self._faults.mkdir()
        self._log = self.recipe.parent / f"{self.folder.name}.log"
        self._offset = 0  # bytes of the log that processes which have ended wrote

    # -- its processes -------------------------------------------------------------------------------------------------

    def start(self, *options: str) -> None:
        """Start a process, and return when all workers are there or it has ended."""
        command = [sys.executable, "-m", "tlt", "train", str(self.recipe), "--run.folder", str(self.folder)]
        paths = os.pathsep.join([str(_HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        for path in self._faults.iterdir():  # files of points that a killed process was in
            path.unlink()
        (self.folder / "config.json").unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.options, *options],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=os.environ | {"PYTHONPATH": paths, "TLT_FAULTS": str(self._faults)},
            )
        while self.process.poll() is None and not (self.folder / "config.json").is_file():
            time.sleep(0.02)

    def go_on(self) -> None:
        """Start the run again: from its last checkpoint if there is one, else from the beginning."""
        self.start(*(["--resume"] if self.has_a_checkpoint() else ["--run.overwrite", "true"]))

    def has_a_checkpoint(self) -> bool:
        return any((self.folder / "checkpoints").glob("step_*"))

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def log_text(self) -> str:
        """What the present process has written to the log."""
        with self._log.open("rb") as log:
            log.seek(self._offset)
            return log.read().decode("utf-8", "replace")

    def note_end(self) -> str:
        """Wait for the end of the process, note what it left behind, and return its last line. Raises RuntimeError if
        it ended by itself and does not say how to go on."""
        code, text = self.process.wait(), self.log_text()
        self._offset = self._log.stat().st_size
        until = time.monotonic() + _GONE_WITHIN
        while (left := traces_of(self.process.pid)) and time.monotonic() < until:
            time.sleep(0.1)
        self.left_behind += left
        last = (text.strip().splitlines() or [""])[-1]
        if code > 0 and not re.search(r"--resume|nothing was saved yet", last):
            raise RuntimeError(f"a run that was to be resumed says {last!r}")
        return last

    # -- faults --------------------------------------------------------------------------------------------------------

    @property
    def filler(self) -> Path:
        return self.folder.parent / "filler"

    def make_room(self) -> None:
        self.filler.unlink(missing_ok=True)

    def arm(self, cell: Cell) -> None:
        wanted = {"at": cell.at, "call": cell.call, "during": cell.during, "how": cell.fault, "fill": str(self.filler)}
        (self._faults / "struck.json").unlink(missing_ok=True)
        fresh = self._faults / "armed.partial"
        fresh.write_text(json.dumps(wanted), encoding="utf-8")
        fresh.rename(self._faults / "armed.json")

    def disarm(self) -> None:
        (self._faults / "armed.json").unlink(missing_ok=True)

    def struck(self) -> int | None:
        """Id of the process that the fault has struck; None if it has struck none."""
        with suppress(OSError):
            return json.loads((self._faults / "struck.json").read_text(encoding="utf-8"))["pid"]
        return None

    def is_struck(self, cell: Cell, within: float) -> int | None:
        """Arm the fault, and wait for it for `within` seconds or until the run has ended. Returns the id of the process
        that it struck, or None."""
        self.arm(cell)
        until = time.monotonic() + within
        while (struck := self.struck()) is None and time.monotonic() < until and not self.has_ended():
            time.sleep(0.01)
        self.disarm()
        return struck if struck is not None else self.struck()

    def last_step(self) -> int:
        """The last step on record; 0 before the first."""
        with suppress(OSError), (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 15)))
            lines = file.read().split(b"\n")[:-1]
            return json.loads(lines[-1])["step"] if lines else 0
        return 0


# -- processes, and what they leave ------------------------------------------------------------------------------------


def environments() -> dict[int, dict[str, str]]:
    """Environments, by id, of all processes that this user may look at."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pairs = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            found[int(path.name)] = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return found


def folders_of(driver: int) -> list[Path]:
    """Folders of the driver's Ray; their names hold the driver's process id."""
    return [path for path in Path(tempfile.gettempdir()).glob(f"tlt_{driver}_*") if path.is_dir()]


def processes_of(driver: int) -> list[int]:
    """Ids of the processes of the driver's Ray."""
    folders = {str(folder) for folder in folders_of(driver)}
    return [pid for pid, names in environments().items() if names.get(MARK) in folders]


def workers_of(driver: int) -> list[int]:
    return [pid for pid in processes_of(driver) if command_of(pid).startswith("ray::Actor")]


def rewards_of(driver: int) -> list[int]:
    """Ids of the processes that compute rewards: the driver spawned them by multiprocessing, as their command says."""
    children = Path(f"/proc/{driver}/task/{driver}/children")
    with suppress(OSError):
        return [int(pid) for pid in children.read_text().split() if "spawn_main" in command_of(int(pid))]
    return []


def traces_of(driver: int) -> list[str]:
    prefix = str(Path(tempfile.gettempdir()) / f"tlt_{driver}_")
    processes = [pid for pid, names in environments().items() if names.get(MARK, "").startswith(prefix)]
    shared = _shared() - SHARED_BEFORE
    return [
        *(f"process {pid} {command_of(pid)}" for pid in processes),
        *(str(folder) for folder in folders_of(driver)),
        *(f"/dev/shm/{name}" for name in shared),
    ]


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _shared() -> set[str]:
    """Names in shared memory, without semaphores of `multiprocessing`: neither a run nor Ray makes any."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


SHARED_BEFORE = _shared()


def end_in_order() -> None:
    """Make SIGTERM end the program by SystemExit, so that it removes all that it made. A second SIGTERM, as `timeout`
    sends, is ignored."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


@contextmanager
def disk(home: Path, megabytes: int) -> Iterator[Path]:
    """A folder on a small disk of its own, if this user may mount one; else an ordinary folder. On SIGTERM the disk is
    unmounted, too."""
    end_in_order()
    place = home / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(place)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield place
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)
