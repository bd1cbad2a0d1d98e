"""Tries every fault at every point where it makes sense: role x phase x fault, in real processes, with two workers.

    python bench/fault_matrix.py [--role worker ...] [--fault SIGKILL ...] [--phase decode ...] [--json FILE]

Each cell must end by itself within `_LIMIT` seconds: the run goes on; or it ends with a sentence that names the cause
and says how to go on, and is then resumed. In any case, each checkpoint must hold the policy and the optimizer's
moments of the undisturbed run after as many steps, and a process that has ended must leave nothing behind. A reward
that raises or does not answer leaves its response without a reward, which is recorded; checkpoints of such a cell are
not compared.

Cells of one role and one fault use one run, one after the other. A
cell is over when two more steps are recorded, or six if the disk was full. Parts of the matrix may be tried one after
the other, into one FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from disturbed import CELLS, PATIENCE, USUAL, Cell, DisturbedRun, disk, recipe_of

from tlt.metrics import provenance, read_metrics, write_json

_LIMIT = 12 * PATIENCE + 40.0  # seconds: the longest deadline of a call, and a new worker
_COMES_WITHIN = 20.0  # seconds for the run to come to an armed point
_TRIES = 3  # times that a point is armed
_STOPPED = PATIENCE + 1.0  # seconds for which a driver is stopped
_MEGABYTES = 96  # size of the disk that runs are on
_SAVES = 6  # steps of which one is saved: to record a step needs no room on the disk
_FILES = ("policy/model.safetensors", "optimizer.safetensors")
_CAUSES = {
    "SIGKILL": r"worker \d+ was lost during \w+ \(",
    "SIGSTOP": r"worker \d+ was lost during \w+ \(no answer for",
    "exception": "struck",
    "out of memory": r"[Mm]emory",
    "disk full": r"No space left|free disk space",
}
"""by fault, the pattern that must be found on the screen or in the log of a worker"""


def digests(folder: Path) -> dict[int, list[str]]:
    """Hashes in a run's present checkpoints: number of steps -> sha256 of policy and moments."""
    found = {}
    for path in (folder / "checkpoints").glob("step_*/manifest.json"):
        with suppress(OSError, ValueError):  # an old checkpoint that is just being removed
            manifest = json.loads(path.read_text(encoding="utf-8"))
            found[int(path.parent.name.removeprefix("step_"))] = [manifest[name] for name in _FILES]
    return found


class Matrix:
    """Cells that were tried, and the undisturbed run."""

    def __init__(self, home: Path, place: Path, steps: int) -> None:
        """Do the undisturbed run. `place`: the small disk for the disturbed runs."""
        self.place, self.recipe = place, recipe_of(home, USUAL, steps)
        self.rows: list[dict[str, Any]] = []
        whole = DisturbedRun(self.recipe, home / "whole", ("--run.save_every", "1", "--run.keep", str(steps)))
        whole.start()
        whole.note_end()
        self.expected, lines = digests(home / "whole"), read_metrics(home / "whole")
        self.undisturbed = {
            "steps": len(self.expected),
            "step_seconds": sum(line["seconds"]["total"] for line in lines) / steps,
            "left_behind": whole.left_behind,
        }

    def go_through(self, cells: Sequence[Cell], name: str) -> None:
        """Try these cells in one run, one after the other."""
        run = DisturbedRun(self.recipe, self.place / name)
        run.start()
        while not (run.has_ended() or run.has_a_checkpoint()):
            time.sleep(0.1)
        rows = []
        for cell in cells:
            if run.has_ended():  # all its steps are done
                break
            rows.append(self.suffer(run, cell))
            print(_summary(rows[-1]), flush=True)
        if not run.has_ended():
            run.process.send_signal(signal.SIGTERM)
        run.note_end()
        rows[-1]["other_steps"] += self._other_steps(run, cells[-1])
        rows[-1]["left_behind"] += run.left_behind
        self.rows += rows
        shutil.rmtree(run.folder)

    def suffer(self, run: DisturbedRun, cell: Cell) -> dict[str, Any]:
        """Try one cell; returns what became of the run."""
        row: dict[str, Any] = {"role": cell.role, "phase": cell.phase, "fault": cell.fault, "ends": "did not come"}
        heard_before, step = _logs(run), run.last_step()
        if not (struck := _struck(run, cell)):
            return row | {"said": "", "other_steps": self._other_steps(run, cell), "left_behind": []}
        began = time.monotonic()
        if (cell.role, cell.fault) == ("driver", "SIGSTOP"):
            time.sleep(_STOPPED)
            os.kill(struck, signal.SIGCONT)
        step = max(step, run.last_step())
        row["ends"] = _goes_on(run, step + (_SAVES if cell.fault == "disk full" else 2))
        row["seconds"] = time.monotonic() - began
        said = "".join(text.removeprefix(heard_before.get(name, "")) for name, text in _logs(run).items())
        causes = [line.strip() for line in said.splitlines() if re.search(_CAUSES[cell.fault], line)]
        row["said"] = _on_record(run, step) or (causes or [""])[-1][:300]
        run.make_room()
        if row["ends"] == "went on" and cell.lets_go:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(_LIMIT)
        if row["ends"] != "went on" or cell.lets_go:
            self._resume(run, row, step)
        row["left_behind"], run.left_behind = run.left_behind, []
        return row | {"other_steps": self._other_steps(run, cell)}

    def _resume(self, run: DisturbedRun, row: dict[str, Any], step: int) -> None:
        """Resume a run that has ended, hangs, or is to be started again."""
        if run.process.poll() is None:
            run.process.kill()
        row["last_line"] = run.note_end()
        began = time.monotonic()
        run.go_on()
        if _goes_on(run, step + 2) != "went on":
            row["ends"] = f"{row['ends']}, and is not resumed"
            run.process.kill()
            row["last_line"] = run.note_end()
            run.go_on()
        row["resumed_after"] = time.monotonic() - began

    def _other_steps(self, run: DisturbedRun, cell: Cell) -> list[int]:
        """Numbers of steps after which the checkpoint differs from that of the undisturbed run."""
        if cell.is_on_record:
            return []
        return [step for step, found in digests(run.folder).items() if found != self.expected[step]]


def _struck(run: DisturbedRun, cell: Cell) -> int | None:
    for _ in range(_TRIES):
        if cell.first:
            (first,) = (c for c in CELLS if (c.role, c.phase, c.fault) == (cell.role, cell.first, "SIGKILL"))
            run.is_struck(first, _COMES_WITHIN)
        if struck := run.is_struck(cell, _COMES_WITHIN):
            return struck
    return None


def _goes_on(run: DisturbedRun, to_step: int) -> str:
    until = time.monotonic() + _LIMIT
    while time.monotonic() < until:
        if run.last_step() >= to_step or run.process.poll() == 0:
            return "went on"
        if run.has_ended():
            return "ended"
        time.sleep(0.02)
    return "HANGS"


def _logs(run: DisturbedRun) -> dict[str, str]:
    """The output of the driver and of each worker."""
    workers = {path.name: path.read_text("utf-8", "replace") for path in run.folder.glob("worker_*.log")}
    return {"driver": run.log_text()} | workers


def _on_record(run: DisturbedRun, step: int) -> str:
    """Why responses from this step on have no reward, as recorded; empty if all have one."""
    with suppress(ValueError):
        for line in read_metrics(run.folder)[max(0, step) :]:
            if line.get("outcomes"):
                return f"on record: {line['outcomes']}"
            if line.get("eval", {}).get("without_reward"):
                return f"on record: {line['eval']['without_reward']} of the evaluation without a reward"
    return ""


def held(row: dict[str, Any]) -> bool:
    silent = row["role"] == "driver" and row["fault"] in ("SIGKILL", "SIGSTOP")
    silent |= row["role"] == "reward" and row["fault"] == "SIGKILL"
    clean = not row["other_steps"] and not row["left_behind"]
    return row["ends"] in ("went on", "ended") and clean and bool(row["said"] or silent)


def _summary(row: dict[str, Any]) -> str:
    words = [f"{row['role']}, {row['phase']}, {row['fault']}: {row['ends']} in {row.get('seconds', 0.0):.1f} s"]
    if "resumed_after" in row:
        words.append(f"resumed in {row['resumed_after']:.1f} s")
    return "; ".join([*words, row["said"], *([] if held(row) else [f"DID NOT HOLD {row}"])])


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By role and fault: the number of cells, of those that held and of those that ended the run, and the most seconds
    until a run went on or had ended."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        of = found.setdefault(f"{row['role']}, {row['fault']}", {"cells": 0, "held": 0, "ended": 0, "worst": 0.0})
        of["cells"] += 1
        of["held"] += held(row)
        of["ended"] += row["ends"] == "ended"
        of["worst"] = max(of["worst"], row.get("seconds", 0.0))
    return found


def write(path: Path, matrix: Matrix) -> None:
    """Write the cells. Cells that were in the file already stay, unless they were tried again."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"cells": []}
    by_cell = {(row["role"], row["phase"], row["fault"]): row for row in (*before["cells"], *matrix.rows)}
    rows = [by_cell[cell[:3]] for cell in CELLS if cell[:3] in by_cell]
    tree = {"limit_seconds": _LIMIT, "undisturbed": matrix.undisturbed, "summary": summary(rows), "cells": rows}
    write_json(path, {**tree, **provenance()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("role", "phase", "fault"):
        parser.add_argument(f"--{name}", nargs="+", choices=sorted({getattr(cell, name) for cell in CELLS}))
    parser.add_argument("--steps", type=int, default=500, help="of each run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, disk(Path(folder), _MEGABYTES) as place:
        wanted = [cell for cell in CELLS if place.is_mount() or cell.fault != "disk full"]
        for name in ("role", "phase", "fault"):
            chosen = getattr(arguments, name)
            wanted = [cell for cell in wanted if not chosen or getattr(cell, name) in chosen]
        (home := Path(folder) / "home").mkdir()
        matrix = Matrix(home, place, arguments.steps)
        print(f"undisturbed: {matrix.undisturbed}", flush=True)
        for (role, fault), cells in groupby(wanted, lambda cell: (cell.role, cell.fault)):
            matrix.go_through(list(cells), f"{role} {fault}")
            if arguments.json:
                write(arguments.json, matrix)
    failed = [row for row in matrix.rows if not held(row)]
    print(f"{len(matrix.rows)} of {len(wanted)} cells tried, {len(matrix.rows) - len(failed)} held")
    sys.exit(1 if failed or len(matrix.rows) < len(wanted) else 0)


if __name__ == "__main__":
    main()
