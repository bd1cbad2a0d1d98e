"""Two workers, and faults at random moments: every run must end with the sha256 of one that was left alone.

    python bench/kills.py [--kills 50] [--only "worker SIGSTOP" ...] [--json FILE]

Each fault is drawn from `FAULTS`: a worker killed, as by a lack of memory, or stopped; the driver killed, stopped for a
while or asked to end; a reward's process killed; the disk full. Workers are hit amid whatever they do (decoding,
training the drafter, the update, coming up). A run that ended is resumed. After each end nothing may be left: no
process, no folder, no shared memory. The model is tiny, in float64; idle workers train the drafter from nothing.
A response whose reward's process was killed has no reward, on record: such a run is to end, with another sha256.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recovery import WAYS, verdict, write_recipe

from tlt.cluster.sweeper import MARK

STEPS = 600  # so that they take longer than several workers take to come up, one after the other
_PER_RUN = 10  # kills after which a run is left to end
_PAUSE = (0.05, 1.5)  # between two kills, in units of what the run takes to come up
FAULTS = {
    "worker SIGKILL": 10,
    "worker SIGSTOP": 5,
    "driver SIGKILL": 2,
    "driver SIGTERM": 1,
    "driver SIGSTOP": 1,
    "disk full": 1,
    "reward SIGKILL": 1,
}
"""role and what becomes of it -> how often, as a weight"""
_STOPPED = 2.0  # seconds that a stopped driver stays so
_FULL = 3.0  # seconds that the disk stays full
_GONE_WITHIN = 20.0  # seconds
_MEGABYTES = 96  # of the disk that runs are on


def recipe_of(home: Path, way: str) -> Path:
    """A long tail for its size, so that one worker is often idle, and a drafter small enough to be trained then."""
    training = {"micro_batch_tokens": 32, "unroll": 2, "learning_rate": 1e-2}
    return write_recipe(
        home,
        rollout={"prompts_per_step": 2, "group_size": 3, "max_new_tokens": 64, "stop_strings": list("abcdefghijklm ")},
        speculation={"drafter": "adaptive", "window": 32, "training": training},
        train={"steps": STEPS, "updates_per_step": 2, "learning_rate": 1e-3, "micro_batch_tokens": 256} | WAYS[way],
        cluster={"workers": 2, "slice_seconds": 0.02, "patience": 4.0},
    )


@dataclass
class Trial:
    """One run and what it suffers."""

    recipe: Path
    folder: Path
    kills: int
    moments: random.Random
    faults: Sequence[str] = tuple(FAULTS)
    comes_up: float = 0.0
    """seconds until all workers are there"""
    hit: Counter[str] = field(default_factory=Counter)
    left_behind: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def run(self) -> None:
        began = time.monotonic()
        process = self._start()
        self.comes_up = self.comes_up or time.monotonic() - began
        while process.poll() is None and sum(self.hit[fault] for fault in FAULTS) < self.kills:
            time.sleep(self.comes_up * self.moments.uniform(*_PAUSE))
            (fault,) = self.moments.choices(self.faults, [FAULTS[name] for name in self.faults])
            process = self._strike(fault, process)
        while process.wait() != 0:
            self._note_end(process)
            if not re.search(r"--resume|nothing was saved yet", self.said[-1]):
                raise RuntimeError(f"a run that was to be resumed says {self.said[-1]!r}")
            self.hit["ended, and went on"] += 1
            process = self._start(*(["--resume"] if self._has_a_checkpoint() else ["--run.overwrite", "true"]))
        self._note_end(process)

    def _strike(self, fault: str, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Returns the process of the run from then on."""
        role, how = fault.split()
        others = {"worker": workers_of, "reward": rewards_of}
        if role in others:
            if found := others[role](process.pid):
                self._signal(self.moments.choice(found), how, fault)
        elif role == "disk":
            self._fill(fault, process)
        elif role == "driver" and self._has_a_checkpoint():
            self._signal(process.pid, how, fault)
            if how == "SIGSTOP":
                time.sleep(_STOPPED)
                process.send_signal(signal.SIGCONT)
            else:
                process.wait()
                self._note_end(process)
                return self._start("--resume")
        return process

    def _signal(self, pid: int, how: str, fault: str) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[how])
            self.hit[fault] += 1

    def _fill(self, fault: str, process: subprocess.Popen[bytes]) -> None:
        """The disk that the run's folder lies on, where that is one of its own."""
        if not self.folder.parent.is_mount():
            return
        filler = self.folder.parent / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            self.hit[fault] += 1
            while True:
                file.write(bytes(1 << 12))
        with suppress(subprocess.TimeoutExpired):
            process.wait(_FULL)
        filler.unlink()

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tlt", "train", str(self.recipe), "--run.folder", str(self.folder), *options]
        came_up = self.folder / "config.json"
        came_up.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        while process.poll() is None and not came_up.is_file():
            time.sleep(0.01)
        return process

    @property
    def _log(self) -> Path:
        return self.recipe.parent / f"{self.folder.name}.log"

    def _has_a_checkpoint(self) -> bool:
        return any((self.folder / "checkpoints").glob("step_*"))

    def _note_end(self, process: subprocess.Popen[bytes]) -> None:
        """What the driver said, and what is left of it."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        self._log.write_text("", encoding="utf-8")
        self.said.append((text.strip().splitlines() or [""])[-1])
        self.hit.update(f"amid {what}" for what in re.findall(r"worker \d+ was lost amid (\w+)", text))
        until = time.monotonic() + _GONE_WITHIN
        while (left := traces_of(process.pid)) and time.monotonic() < until:
            time.sleep(0.1)
        self.left_behind += left


def environments() -> dict[int, dict[str, str]]:
    """Of all processes that this user may look at."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pairs = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            found[int(path.name)] = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return found


def folders_of(driver: int) -> list[Path]:
    """Ray's folder bears the driver's number."""
    return [path for path in Path(tempfile.gettempdir()).glob(f"tlt_{driver}_*") if path.is_dir()]


def workers_of(driver: int) -> list[int]:
    folders = {str(folder) for folder in folders_of(driver)}
    marked = [pid for pid, names in environments().items() if names.get(MARK) in folders]
    return [pid for pid in marked if _command(pid).startswith("ray::Actor")]


def rewards_of(driver: int) -> list[int]:
    """Processes that score: those that the driver spawned by multiprocessing, whose command says so."""
    children = Path(f"/proc/{driver}/task/{driver}/children")
    with suppress(OSError):
        return [int(pid) for pid in children.read_text().split() if "spawn_main" in _command(int(pid))]
    return []


@contextmanager
def disk(home: Path, megabytes: int) -> Iterator[Path]:
    """A small one of its own, where this user may mount one; else the same as everything else."""
    place = home / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(place)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield place
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


def traces_of(driver: int) -> list[str]:
    prefix = str(Path(tempfile.gettempdir()) / f"tlt_{driver}_")
    processes = [pid for pid, names in environments().items() if names.get(MARK, "").startswith(prefix)]
    shared = [name for name in os.listdir("/dev/shm") if name not in SHARED_BEFORE]
    return [
        *(f"process {pid} {_command(pid)}" for pid in processes),
        *(str(folder) for folder in folders_of(driver)),
        *(f"/dev/shm/{name}" for name in shared),
    ]


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


SHARED_BEFORE = set(os.listdir("/dev/shm"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", choices=WAYS, default="whole weights", help="to train")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), help="these faults; all by default")
    parser.add_argument("--per-run", type=int, default=_PER_RUN, help="faults after which a run is left to end")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, disk(Path(folder), _MEGABYTES) as place:
        recipe = recipe_of(Path(folder), arguments.way)
        whole = Trial(recipe, place / "whole", 0, moments)
        whole.run()
        print(f"undisturbed: {whole.left_behind or 'nothing'} left behind", flush=True)
        summary = json.loads((place / "whole" / "summary.json").read_text(encoding="utf-8"))
        left = arguments.kills
        while left > 0:
            most = min(left, arguments.per_run)
            trial = Trial(recipe, place / f"run {len(rows)}", most, moments, arguments.only, whole.comes_up)
            trial.run()
            left -= sum(trial.hit[fault] for fault in FAULTS) or 1
            held = verdict(trial.folder, summary["policy_sha256"], prompts=6)
            held["same_sha256"] |= bool(trial.hit["reward SIGKILL"])  # which is on record
            rows.append({"hit": dict(trial.hit), "left_behind": trial.left_behind, **held})
            print(rows[-1], flush=True)
            shutil.rmtree(trial.folder)
    hits = sum((Counter(row["hit"]) for row in rows), Counter())
    ended_equal = sum(row["same_sha256"] and row["steps_in_order"] and row["consumed_once"] for row in rows)
    clean = sum(not row["left_behind"] for row in rows)
    kills = sum(hits[fault] for fault in FAULTS)
    print(f"{kills} faults in {len(rows)} runs: {ended_equal} ended with the same sha256, {clean} left nothing behind")
    if arguments.json:
        from tlt.metrics import provenance, write_json

        states = summary["workers"]
        totals = {"kills": kills, "hits": dict(hits), "runs": len(rows), "ended_equal": ended_equal, "clean": clean}
        totals["way"] = arguments.way
        undisturbed = {"sha256": summary["policy_sha256"], "workers": states, "left_behind": whole.left_behind}
        write_json(arguments.json, {**totals, "undisturbed": undisturbed, "rows": rows, **provenance()})


if __name__ == "__main__":
    main()
