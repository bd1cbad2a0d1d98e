"""Checks that a run which is disturbed and resumed ends with the undisturbed sha256, each prompt consumed once.

    python bench/recovery.py [--kills 50] [--terms 50] [--points N] [--json FILE]

Disturbances are SIGKILL and SIGTERM at random moments of a real process, and the end of the process before, amid and
after every write, flush, rename, unlink and folder operation of a resumed step with its save. The model is tiny, in
float64.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
STEPS = 24
WAYS: dict[str, dict[str, Any]] = {
    "whole weights": {},
    "several epochs": {"epochs": 2, "updates_per_step": 2},
    "LoRA": {"lora": {"rank": 2}, "epochs": 2, "learning_rate": 1e-2},
}
"""ways to train: name -> settings of [train]"""
os.environ.setdefault("TQDM_DISABLE", "1")


# -- every write, flush, rename and unlink -----------------------------------------------------------------------------


class Crash(BaseException):
    """Stands for the end of the process at this point."""


class Faults:
    """Counts the points before, amid and after each file operation of the main thread, and acts at one of them."""

    def __init__(self, at: int = -1, act: Callable[[], None] | None = None) -> None:
        self.at, self.act = at, act or _crash
        self.points = 0
        self.counts: Counter[str] = Counter()

    def point(self) -> None:
        if self.points == self.at:
            self.points += 1  # what is cleared up after the fault meets no second one
            self.act()
        self.points += 1

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return call(*args, **options)
            self.counts[name] += 1
            self.point()
            result = call(*args, **options)
            self.point()
            return result

        return wrapped

    def open(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if (
                isinstance(file, int)
                or mode[0] not in "wax"
                or threading.current_thread() is not threading.main_thread()
            ):
                return call(file, mode, *args, **options)
            found = self.wrap("open", call)(file, mode, *args, **options)
            real = found.write

            def write(content: Any) -> int:
                self.counts["write"] += 1
                self.point()
                real(content[: len(content) // 2])
                found.flush()
                self.point()
                real(content[len(content) // 2 :])
                found.flush()
                self.point()
                return len(content)

            return _Writer(found, write)

        return opened

    def serialize_file(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def serialized(tensors: Any, filename: Any, metadata: Any = None) -> None:
            self.counts["write"] += 1
            self.point()
            call(tensors, filename, metadata)
            whole = Path(filename).read_bytes()
            os.truncate(filename, len(whole) // 2)
            self.point()
            os.truncate(filename, 0)
            call(tensors, filename, metadata)
            self.point()

        return serialized


class _Writer:
    """A file with a `write` of our own."""

    def __init__(self, file: Any, write: Callable[[Any], int]) -> None:
        self._file, self.write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()


@contextmanager
def faults(at: int = -1, act: Callable[[], None] | None = None) -> Iterator[Faults]:
    """Within the block, call `act` at the point with number `at`; by default it raises Crash. At -1 only count."""
    import safetensors.torch

    found = Faults(at, act)
    opened = found.open(io.open)
    patches = [patch.object(owner, "open", opened) for owner in (builtins, io)]
    for name in ("fsync", "mkdir", "rename", "replace", "unlink", "rmdir"):
        patches.append(patch.object(os, name, found.wrap(name, getattr(os, name))))
    serialize = vars(safetensors.torch)["serialize_file"]
    patches.append(patch.object(safetensors.torch, "serialize_file", found.serialize_file(serialize)))
    for one in patches:
        one.start()
    try:
        yield found
    finally:
        for one in patches:
            one.stop()


def _crash() -> None:
    raise Crash


# -- the run -----------------------------------------------------------------------------------------------------------


def write_recipe(home: Path, **sections: dict[str, Any]) -> Path:
    """A recipe of the tests' tiny model, prompts and reward."""
    from tlt.config import parse_config
    from tlt.config.recipe import resolved

    sys.path.insert(0, str(ROOT / "tests"))
    tiny_tree = importlib.import_module("tiny").tiny_tree
    run = {"folder": str(home / "run"), "save_every": 2, "keep": 2}
    reward = {"reward": {"name": "tiny_rewards:share_of_low_bytes", "folder": str(ROOT / "tests")}}
    tree = tiny_tree(home, **{"train": {"steps": STEPS}, "run": run, **reward, **sections})
    path = home / "recipe.toml"
    path.write_text(resolved(parse_config(tree)), encoding="utf-8")
    return path


def train_here(recipe: Path, folder: Path, resume: bool = False, steps: int = STEPS, keep: int = 2) -> dict[str, Any]:
    """Do a run in this process; returns its summary."""
    from rich.console import Console

    from tlt.config import load_config
    from tlt.run.display import Display
    from tlt.run.train import train

    overrides = ["--run.folder", str(folder), "--train.steps", str(steps), "--run.keep", str(keep)]
    config = load_config(recipe, overrides)
    return train(config, resume, Display(Console(quiet=True)))


def start(recipe: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tlt", "train", str(recipe), "--run.folder", str(folder), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def verdict(folder: Path, expected: str, prompts: int) -> dict[str, bool]:
    """What must hold of a run at its end."""
    from tlt.metrics import read_metrics

    lines = read_metrics(folder)
    consumed = [tuple(pair) for line in lines for pair in line["prompts"]]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "same_sha256": summary["policy_sha256"] == expected,
        "steps_in_order": [line["step"] for line in lines] == list(range(1, len(lines) + 1)),
        "consumed_once": len(set(consumed)) == len(consumed)
        and [epoch for _, epoch in consumed] == [i // prompts for i in range(len(consumed))],
    }


# -- disturbances ------------------------------------------------------------------------------------------------------


def at_every_point(recipe: Path, home: Path, most: int | None = None) -> dict[str, Any]:
    """Do one step and its save in this process, cut short at each point in turn (or at `most` of them, evenly)."""
    expected = train_here(recipe, home / "cut whole", steps=3)["policy_sha256"]
    train_here(recipe, home / "cut base", steps=2)

    def resumed(at: int) -> tuple[Faults, Path]:
        folder = home / f"cut {at}"
        shutil.copytree(home / "cut base", folder, symlinks=True)
        with faults(at) as found, suppress(Crash):
            train_here(recipe, folder, resume=True, steps=3, keep=1)  # so that the older checkpoint is removed
        return found, folder

    whole, _ = resumed(-1)
    points = sorted({round(i * (whole.points - 1) / (most - 1)) for i in range(most)}) if most else range(whole.points)
    failed = []
    for at in points:
        _, folder = resumed(at)
        train_here(recipe, folder, resume=True, steps=3)
        held = verdict(folder, expected, prompts=6)
        if not all(held.values()):
            failed.append({"point": at, **held})
        shutil.rmtree(folder)
    return {"operations": dict(whole.counts), "points": whole.points, "tried": len(points), "failed": failed}


def at_random_moments(
    recipe: Path, home: Path, number: signal.Signals, trials: int, expected: str, lasts: float, seed: int = 0
) -> dict[str, Any]:
    """Run `trials` real processes. Each is sent the signal at a random moment of the `lasts` seconds that a run takes,
    and is then resumed to the end."""
    moments = random.Random(f"{seed}/{number}")
    rows: list[dict[str, Any]] = []
    for trial in range(trials):
        folder = home / f"{number.name} {trial}"
        row = _disturb(recipe, folder, number, moments.uniform(0, lasts))
        if row["exit"] != 0:  # else the run was over before the signal
            _finish(start(recipe, folder, *(["--resume"] if row["checkpoints"] else ["--run.overwrite", "true"])))
        rows.append(row | verdict(folder, expected, prompts=6))
        shutil.rmtree(folder)
    return {
        "signal": number.name,
        "trials": trials,
        "cut_short": sum(row["exit"] != 0 for row in rows),
        "before_the_first_checkpoint": sum(not row["checkpoints"] for row in rows),
        "ended_equal": sum(row["same_sha256"] and row["steps_in_order"] and row["consumed_once"] for row in rows),
        "slowest_exit_seconds": max((row["seconds_to_exit"] for row in rows), default=0.0),
        "rows": rows,
    }


def undisturbed(recipe: Path, home: Path) -> tuple[str, float]:
    """The sha256 of an undisturbed run, and the seconds from the start of the run (not of the process) to its end."""
    process = start(recipe, home / "whole")
    _wait_for_the_run(home / "whole", process)
    began = time.monotonic()
    _finish(process)
    summary = json.loads((home / "whole" / "summary.json").read_text(encoding="utf-8"))
    return summary["policy_sha256"], time.monotonic() - began


def _disturb(recipe: Path, folder: Path, number: signal.Signals, moment: float) -> dict[str, Any]:
    from tlt.metrics import read_metrics

    process = start(recipe, folder)
    _wait_for_the_run(folder, process)
    time.sleep(moment)
    process.send_signal(number)
    sent = time.monotonic()
    _, said = process.communicate(timeout=600)
    checkpoints = sorted(p.name for p in (folder / "checkpoints").glob("step_*"))
    return {
        "moment": round(moment, 3),
        "exit": process.returncode,
        "seconds_to_exit": round(time.monotonic() - sent, 3),
        "steps_recorded": len(read_metrics(folder)),
        "checkpoints": checkpoints,
        "said": said.strip().splitlines()[-1].replace(f"{folder.parent}/", "") if said.strip() else "",
    }


def _wait_for_the_run(folder: Path, process: subprocess.Popen[str]) -> None:
    while not (folder / "config.json").is_file():
        if process.poll() is not None:
            raise RuntimeError(f"the run did not start: {process.communicate()[1]}")
        time.sleep(0.005)


def _finish(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=600)
    if process.returncode != 0:
        raise RuntimeError(f"a run that nobody disturbed ended with {process.returncode}: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs at random moments")
    parser.add_argument("--terms", type=int, default=50, help="SIGTERMs at random moments")
    parser.add_argument("--points", type=int, help="at most so many of the points of a save; all by default")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="to train; all by default")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {way: disturbed(way, arguments) for way in arguments.ways}
    if arguments.json:
        from tlt.metrics import provenance, write_json

        write_json(arguments.json, {"ways": results, **provenance()})


def disturbed(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Try all disturbances on runs that train in this way."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        recipe = write_recipe(home, train={"steps": STEPS} | WAYS[way])
        points = at_every_point(recipe, home, arguments.points)
        tried = f"{points['tried']} of {points['points']} points of {points['operations']}"
        print(f"{way}: {tried}: {len(points['failed'])} failed", flush=True)
        expected, lasts = undisturbed(recipe, home)
        results = []
        for number, trials in ((signal.SIGKILL, arguments.kills), (signal.SIGTERM, arguments.terms)):
            found = at_random_moments(recipe, home, number, trials, expected, lasts)
            results.append(found)
            print(
                f"{way}: {number.name} at {trials} random moments: {found['cut_short']} cut short, "
                f"{found['ended_equal']} ended with the same sha256",
                flush=True,
            )
    return {"every_point": points, "run_seconds": lasts, "random_moments": results}


if __name__ == "__main__":
    main()
