"""Two workers, and processes killed at random moments: every run must end with the sha256 of one that was left alone.

    python bench/kills.py [--kills 50] [--json FILE]

Workers are killed amid whatever they do (decoding, training the drafter, the update, coming up), and now and then the
driver, whose run is then resumed. After each end nothing may be left: no process, no folder, no shared memory. The
model is tiny, in float64; the drafter is trained from nothing by workers that are idle.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recovery import WAYS, verdict, write_recipe

from tlt.cluster.sweeper import MARK

STEPS = 600  # so that they take longer than several workers take to come up, one after the other
_PER_RUN = 10  # kills after which a run is left to end
_PAUSE = (0.05, 1.5)  # between two kills, in units of what the run takes to come up
_DRIVER = 0.1  # share of the kills that meet the driver
_GONE_WITHIN = 20.0  # seconds


def recipe_of(home: Path, way: str) -> Path:
    """A long tail for its size, so that one worker is often idle, and a drafter small enough to be trained then."""
    training = {"micro_batch_tokens": 32, "unroll": 2, "learning_rate": 1e-2}
    return write_recipe(
        home,
        rollout={"prompts_per_step": 2, "group_size": 3, "max_new_tokens": 64, "stop_strings": list("abcdefghijklm ")},
        speculation={"drafter": "adaptive", "window": 32, "training": training},
        train={"steps": STEPS, "updates_per_step": 2, "learning_rate": 1e-3, "micro_batch_tokens": 256} | WAYS[way],
        cluster={"workers": 2, "slice_seconds": 0.02},
    )


@dataclass
class Trial:
    """One run and what it suffers."""

    recipe: Path
    folder: Path
    kills: int
    moments: random.Random
    comes_up: float = 0.0
    """seconds until all workers are there"""
    hit: Counter[str] = field(default_factory=Counter)
    left_behind: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def run(self) -> None:
        began = time.monotonic()
        process = self._start()
        self.comes_up = self.comes_up or time.monotonic() - began
        while process.poll() is None and sum(self.hit.values()) < self.kills:
            time.sleep(self.comes_up * self.moments.uniform(*_PAUSE))
            if self.moments.random() < _DRIVER and self._has_a_checkpoint():
                process.kill()
                self.hit["driver"] += process.wait() == -signal.SIGKILL
                self._note_end(process)
                process = self._start("--resume")
            elif found := workers_of(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(self.moments.choice(found), signal.SIGKILL)
                    self.hit["worker"] += 1
        while process.wait() != 0:
            self._note_end(process)
            if "--resume" not in self.said[-1]:
                raise RuntimeError(f"a run that was to be resumed says {self.said[-1]!r}")
            self.hit["all workers lost"] += 1
            process = self._start(*(["--resume"] if self._has_a_checkpoint() else ["--run.overwrite", "true"]))
        self._note_end(process)

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tlt", "train", str(self.recipe), "--run.folder", str(self.folder), *options]
        came_up = self.folder / "config.json"
        came_up.unlink(missing_ok=True)
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        while process.poll() is None and not came_up.is_file():
            time.sleep(0.01)
        return process

    def _has_a_checkpoint(self) -> bool:
        return any((self.folder / "checkpoints").glob("step_*"))

    def _note_end(self, process: subprocess.Popen[bytes]) -> None:
        """What the driver said, and what is left of it."""
        path = self.folder.parent / f"{self.folder.name}.log"
        text = path.read_text(encoding="utf-8", errors="replace")
        path.write_text("", encoding="utf-8")
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
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        recipe = recipe_of(home, arguments.way)
        whole = Trial(recipe, home / "whole", 0, moments)
        whole.run()
        print(f"undisturbed: {whole.left_behind or 'nothing'} left behind", flush=True)
        summary = json.loads((home / "whole" / "summary.json").read_text(encoding="utf-8"))
        left = arguments.kills
        while left > 0:
            trial = Trial(recipe, home / f"run {len(rows)}", min(left, _PER_RUN), moments, whole.comes_up)
            trial.run()
            left -= trial.hit["worker"] + trial.hit["driver"]
            held = verdict(trial.folder, summary["policy_sha256"], prompts=6)
            rows.append({"hit": dict(trial.hit), "left_behind": trial.left_behind, **held})
            print(rows[-1], flush=True)
    hits = sum((Counter(row["hit"]) for row in rows), Counter())
    ended_equal = sum(row["same_sha256"] and row["steps_in_order"] and row["consumed_once"] for row in rows)
    clean = sum(not row["left_behind"] for row in rows)
    kills = hits["worker"] + hits["driver"]
    print(f"{kills} kills in {len(rows)} runs: {ended_equal} ended with the same sha256, {clean} left nothing behind")
    if arguments.json:
        from tlt.metrics import provenance, write_json

        states = summary["workers"]
        totals = {"kills": kills, "hits": dict(hits), "runs": len(rows), "ended_equal": ended_equal, "clean": clean}
        totals["way"] = arguments.way
        undisturbed = {"sha256": summary["policy_sha256"], "workers": states, "left_behind": whole.left_behind}
        write_json(arguments.json, {**totals, "undisturbed": undisturbed, "rows": rows, **provenance()})


if __name__ == "__main__":
    main()
