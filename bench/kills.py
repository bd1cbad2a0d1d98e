"""Disturbs runs of two workers at random: every run must end with the sha256 of an undisturbed one.

    python bench/kills.py [--kills 50] [--dtype bfloat16] [--only "worker SIGKILL" ...] [--json FILE]

A fault comes at a random moment (`MOMENTS`: a worker is killed, as by a lack of memory, or stopped; the driver is
killed, stopped for a while or asked to end; a reward's process is killed; the disk is full), or it is a cell of
`bench/fault_matrix.py`, which strikes at its point of the program. A worker may be hit in any phase, also while it
comes up. A run that ended is resumed. After each end nothing may be left: no process, no folder, no shared memory. The
model is tiny; idle workers train the drafter from random weights.
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
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disturbed import CELLS, PATIENCE, USUAL, WAYS, Cell, DisturbedRun, disk, recipe_of, rewards_of, workers_of
from recovery import verdict

from tlt.metrics import provenance, write_json

STEPS = 600  # so that a run takes longer than it takes several workers to come up, one after the other
_PER_RUN = 10  # faults after which a run is left to end
_PAUSE = (0.02, 0.5)  # between two faults, in units of the seconds that the run takes to come up
MOMENTS = {
    "worker SIGKILL": 10,
    "worker SIGSTOP": 5,
    "driver SIGKILL": 2,
    "driver SIGTERM": 1,
    "driver SIGSTOP": 1,
    "disk full": 1,
    "reward SIGKILL": 1,
}
"""role and fault at a random moment -> weight with which it is drawn"""
_AT_A_POINT = "cell"
_CELLS = [cell for cell in CELLS if not cell.is_on_record]  # the others may end with another sha256
_FAULTS = {**MOMENTS, _AT_A_POINT: sum(MOMENTS.values())}
_COMES_WITHIN = 5.0  # seconds for the run to come to an armed point; then another fault is drawn
_STOPPED = (2.0, PATIENCE + 2.0)  # seconds for which a driver is stopped
_FULL = 3.0  # seconds for which the disk stays full
_MEGABYTES = 96  # size of the disk that runs are on


@dataclass
class Trial:
    """One run and its faults."""

    run: DisturbedRun
    kills: int
    moments: random.Random
    cells: Sequence[Cell] = ()
    faults: Sequence[str] = tuple(_FAULTS)
    comes_up: float = 0.0
    """seconds until all workers are there"""
    hit: Counter[str] = field(default_factory=Counter)
    done: int = 0

    def go_through(self) -> None:
        began = time.monotonic()
        self.run.start()
        self.comes_up = self.comes_up or time.monotonic() - began
        while not self.run.has_ended() and self.done < self.kills:
            time.sleep(self.comes_up * self.moments.uniform(*_PAUSE))
            (fault,) = self.moments.choices(self.faults, [_FAULTS[name] for name in self.faults])
            struck = self._strike(self.moments.choice(self.cells)) if fault == _AT_A_POINT else self._befall(fault)
            if struck:
                self.done += 1
                self.hit[struck] += 1
            if self.run.has_ended() and self.run.process.returncode != 0:
                self._go_on()
        while self.run.process.wait() != 0:
            self._go_on()
        self._note_end()

    def _go_on(self) -> None:
        self._note_end()
        self.hit["ended, and went on"] += 1
        self.run.go_on()

    def _strike(self, cell: Cell) -> str:
        """Try a fault at a point of the program; returns the cell's name, or "" if the run did not come to it."""
        full = cell.fault == "disk full"
        if (full and not self.run.folder.parent.is_mount()) or not self.run.has_a_checkpoint():
            return ""
        struck = self.run.is_struck(cell, _COMES_WITHIN)
        if struck and full:
            self._make_room()
        elif struck and (cell.role, cell.fault) == ("driver", "SIGSTOP"):
            self._wake(struck)
        return cell.name if struck else ""

    def _befall(self, fault: str) -> str:
        """Cause a fault at this moment; returns its name, or "" if that was not possible."""
        role, how = fault.split()
        others = {"worker": workers_of, "reward": rewards_of}
        driver = self.run.process.pid
        if role in others:
            found = others[role](driver)
            return self._signal(self.moments.choice(found), how, fault) if found else ""
        if role == "disk":
            return self._fill(fault)
        if not self.run.has_a_checkpoint():
            return ""
        signalled = self._signal(driver, how, fault)
        if how == "SIGSTOP":
            self._wake(driver)
        else:
            self.run.process.wait()
        return signalled

    def _signal(self, pid: int, how: str, fault: str) -> str:
        try:
            os.kill(pid, signal.Signals[how])
        except ProcessLookupError:
            return ""
        return fault

    def _wake(self, driver: int) -> None:
        time.sleep(self.moments.uniform(*_STOPPED))
        with suppress(ProcessLookupError):
            os.kill(driver, signal.SIGCONT)

    def _fill(self, fault: str) -> str:
        """Fill the run's disk for a while; returns the fault, or "" if the run has no disk of its own."""
        if not self.run.folder.parent.is_mount():
            return ""
        with suppress(OSError), self.run.filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        self._make_room()
        return fault

    def _make_room(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.run.process.wait(_FULL)
        self.run.make_room()

    def _note_end(self) -> None:
        text = self.run.log_text()
        self.hit.update(f"during {what}" for what in re.findall(r"worker \d+ was lost during (\w+)", text))
        self.run.note_end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32", "bfloat16"])
    parser.add_argument("--way", choices=WAYS, default=USUAL, help="to train")
    parser.add_argument("--only", nargs="+", choices=_FAULTS, default=list(_FAULTS), help="all by default")
    parser.add_argument("--per-run", type=int, default=_PER_RUN, help="faults after which a run is left to end")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, disk(Path(folder), _MEGABYTES) as place:
        recipe = recipe_of(Path(folder), arguments.way, STEPS, dtype=arguments.dtype)
        whole = Trial(DisturbedRun(recipe, place / "whole"), 0, moments)
        whole.go_through()
        print(f"undisturbed: {whole.run.left_behind or 'nothing'} left behind", flush=True)
        summary = json.loads((place / "whole" / "summary.json").read_text(encoding="utf-8"))
        left, undisturbed = arguments.kills, {"sha256": summary["policy_sha256"], "workers": summary["workers"]}
        undisturbed["left_behind"] = whole.run.left_behind
        while left > 0:
            run = DisturbedRun(recipe, place / f"run {len(rows)}")
            trial = Trial(run, min(left, arguments.per_run), moments, _CELLS, arguments.only, whole.comes_up)
            trial.go_through()
            left -= trial.done or 1
            held = verdict(run.folder, summary["policy_sha256"], prompts=6)
            rows.append({"faults": trial.done, "hit": dict(trial.hit), "left_behind": run.left_behind, **held})
            print(rows[-1], flush=True)
            shutil.rmtree(run.folder)
            if arguments.json:  # after each run, as it takes long
                write_json(
                    arguments.json,
                    {
                        **totals(rows),
                        "way": arguments.way,
                        "dtype": arguments.dtype,
                        "undisturbed": undisturbed,
                        "rows": rows,
                    },
                )
    print(
        "{kills} faults in {runs} runs: {ended_equal} ended with the same sha256, {clean} left nothing".format(
            **totals(rows)
        )
    )


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    hits = sum((Counter(row["hit"]) for row in rows), Counter())
    equal = sum(row["same_sha256"] and row["steps_in_order"] and row["consumed_once"] for row in rows)
    clean = sum(not row["left_behind"] for row in rows)
    kills = sum(row["faults"] for row in rows)
    return {"kills": kills, "hits": dict(hits), "runs": len(rows), "ended_equal": equal, "clean": clean, **provenance()}


if __name__ == "__main__":
    main()
