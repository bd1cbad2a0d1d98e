"""The same training run with plain decoding, and with each way to speculate and to use idle time.

    python bench/train.py recipes/longtail.toml [--workers 2] [--steps 30] [--modes plain,frozen] [--section.key value]

All runs start from the same policy and end in the same one, except for explained forks. So step by step the very same
work is compared. Each is an ordinary run of `tlt train` in a process of its own; they take turns, step by step. All are
alive at once: if memory does not suffice for that, give fewer modes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forks import FILE as RESPONSES
from forks import Comparison, compare
from rich.console import Console
from rich.table import Table
from rollout import ratio
from turns import Process, Run, of_the_step, race

from tlt import progress
from tlt.build import for_machine
from tlt.config import Config, ConfigError, load_config, parse_config
from tlt.metrics import provenance, read_metrics, write_json
from tlt.run.resume import as_at_its_start
from tlt.trace import AHEAD, ROLLOUT, SPOT, UPDATE

MODES: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "off", "path": None, "training": {"idle": False}},
    "suffix": {"path": None, "look_ahead": 0, "training": {"idle": False}},
    "frozen": {"look_ahead": 0, "training": {"idle": False}},
    "spot": {"look_ahead": 0, "training": {"idle": True}},
    "ahead": {"training": {"idle": False}},
    "adaptive": {},
}
"""name -> what it changes of the recipe's speculation; `adaptive` is the recipe as `tlt train` runs it"""
_PROBE = 5  # steps by which the better number of workers for plain decoding is found


@dataclass
class Mode:
    """A finished run."""

    name: str
    config: Config
    threads: int
    """threads of each worker"""

    def __post_init__(self) -> None:
        self.folder = Path(self.config.run.folder)
        self.lines = read_metrics(self.folder)
        self.summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of each step, without saving and evaluation."""
        return [sum(of_the_step(line["seconds"]).values()) for line in self.lines]

    @property
    def rollout_seconds(self) -> list[float]:
        return [line["seconds"]["rollout"] for line in self.lines]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all steps: the driver's phases, which sum to the steps; and the workers' time (summed over
        workers) decoding ahead, training the drafter, and idle. Waiting for the run's turn is not idle time."""
        phases = of_the_step(self.summary["seconds"])
        workers = [worker["seconds"] for worker in self.summary["workers"]]
        busy = sum(sum(seconds[state] for state in (ROLLOUT, AHEAD, SPOT, UPDATE)) for seconds in workers)
        idle = max(0.0, len(workers) * sum(self.step_seconds) - busy)
        return {
            **phases,
            "ahead": sum(seconds[AHEAD] for seconds in workers),
            "spot": sum(seconds[SPOT] for seconds in workers),
            "idle": idle,
        }

    def result(self, plain: Mode, frozen: Mode | None, parted: Comparison) -> dict[str, Any]:
        return {
            "name": self.name,
            "workers": self.config.cluster.workers,
            "threads_per_worker": self.threads,
            "step_seconds": statistics.median(self.step_seconds),
            "faster_than_plain": ratio(plain.step_seconds, self.step_seconds),
            "faster_than_frozen": ratio(frozen.step_seconds, self.step_seconds) if frozen else None,
            "rollout_faster_than_plain": ratio(plain.rollout_seconds, self.rollout_seconds),
            "rollout_faster_than_frozen": ratio(frozen.rollout_seconds, self.rollout_seconds) if frozen else None,
            "seen_ahead": [line["rollout"]["seen_ahead"] / line["tokens"] for line in self.lines],
            "ahead_accepted": [_share(line["rollout"], "seen_ahead", "ahead_drafted") for line in self.lines],
            "ahead_seconds_by_step": [sum(worker[AHEAD] for worker in line["workers"]) for line in self.lines],
            "seconds": self.seconds,
            "accept_length": [line["accept_length"] for line in self.lines],
            "first_guess_right": [line["rollout"]["acceptance_rate"].get("eagle") for line in self.lines],
            "seconds_by_step": self.step_seconds,
            "spot_seconds_by_step": [sum(worker[SPOT] for worker in line["workers"]) for line in self.lines],
            "rollout_seconds_by_step": self.rollout_seconds,
            "tokens_per_second": [line["tokens_per_second"] for line in self.lines],
            "drafter_version": [line["rollout"]["spot"].get("version", 0) for line in self.lines],
            "reward": [line["reward"] for line in self.lines],
            "held_out": [self.summary.get(f"eval_{when}") for when in ("first", "last")],
            "policy_sha256": self.summary["policy_sha256"],
            "parted_at_step": parted.first,
            "forks_explained": parted.explained,
            "forks_unexplained": parted.unexplained,
            "forks": [asdict(fork) for fork in parted.forks],
        }


def _share(counts: Mapping[str, float], part: str, whole: str) -> float | None:
    return counts[part] / counts[whole] if counts[whole] else None


def bench_train(config: Config, workers: int, steps: int, names: Sequence[str], json_file: Path | None) -> None:
    """Run all modes, compare them, and write the result. Raises ValueError with one sentence."""
    _refuse(config, names)
    console, config = progress.console(), as_at_its_start(for_machine(config), None)
    shape = _better_shape(config, workers, console) if "plain" in names else workers
    sizes = {name: shape if name == "plain" else workers for name in names}
    reference = next((name for name in names if sizes[name] == workers), None)
    configs = {
        name: mode_config(config, name, sizes[name], steps, keep=steps if name == reference else 1) for name in names
    }
    done = run_in_turn(console, configs)
    results = _compared(done, workers)
    _print(console, results)
    if json_file:
        facts = {"recipe_drafter": config.speculation.path, "dtype": config.model.dtype, "steps": steps}
        write_json(json_file, {"runs": results, "repeats": 1, **facts, **provenance()})


def _refuse(config: Config, names: Sequence[str]) -> None:
    if config.speculation.drafter != "adaptive":
        raise ConfigError("bench/train.py needs speculation.drafter = 'adaptive'")
    if "frozen" in names and config.speculation.path is None:
        raise ConfigError(
            "--modes: frozen needs speculation.path, a drafter to start from: make one with tlt draft train, or leave "
            "frozen out, and all start from a random one"
        )


# -- runs --------------------------------------------------------------------------------------------------------------


def mode_config(config: Config, name: str, workers: int, steps: int, keep: int = 0, folder: str = "") -> Config:
    """The recipe of a mode. `keep`: checkpoints to keep; the reference keeps every step's, as forks are explained by
    its policies. Then all save every step, so that each run takes its turn after one that has saved."""
    tree = config.model_dump(mode="json")
    changed = MODES[name]
    training = tree["speculation"]["training"] | changed.get("training", {})
    tree["speculation"] |= changed | {"training": training}
    tree["cluster"]["workers"] = workers
    tree["train"] |= {"steps": steps, "shard": config.train.shard and workers > 1}
    save = {"save_every": min(keep, 1), "keep": max(keep, 1), "overwrite": True, "compare_every": 0}
    tree["run"] |= {"folder": str(Path(config.run.folder) / "bench" / (folder or name)), **save}
    return parse_config(tree)


def run_in_turn(
    console: Console, configs: dict[str, Config], programs: Mapping[str, str] | None = None
) -> dict[str, Mode]:
    """Do all runs, a step each in turn. `configs`: recipes by mode, or for plain decoding by any other name.
    `programs`: those of the runs that are not done by bench/one_run.py."""
    threads = {name: _threads(config.cluster.workers) for name, config in configs.items()}
    console.rule(", ".join(f"{name} {config.cluster.workers} x {threads[name]}" for name, config in configs.items()))
    runs = {
        name: partial(_start, config, threads[name], (programs or {}).get(name, "one_run.py"))
        for name, config in configs.items()
    }
    steps = next(iter(configs.values())).train.steps
    race(runs, steps, partial(console.print, soft_wrap=True))
    return {name: Mode(name, config, threads[name]) for name, config in configs.items()}


def _threads(workers: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // workers)


def _start(config: Config, threads: int, program: str) -> Run:
    folder = Path(config.run.folder)
    shutil.rmtree(folder, ignore_errors=True)
    write_json(folder / "bench.json", config.model_dump(mode="json"))
    own = threads if config.cluster.workers == 1 else 1  # the driver of several workers computes nothing
    return Process(folder / "bench.json", own, program)


def _better_shape(config: Config, workers: int, console: Console) -> int:
    """The number of workers with which plain decoding is faster: many, or one that has all the cores."""
    if workers == 1:
        return 1
    sizes = {f"plain-{size}": size for size in (workers, 1)}
    probes = run_in_turn(
        console, {name: mode_config(config, "plain", size, _PROBE, folder=name) for name, size in sizes.items()}
    )
    return sizes[min(probes, key=lambda name: statistics.median(probes[name].step_seconds))]


# -- what they show ----------------------------------------------------------------------------------------------------


def _compared(done: dict[str, Mode], workers: int) -> list[dict[str, Any]]:
    """Compare every run with plain's seconds and with the reference's responses. Policies of runs with another number
    of workers differ by the rounding of a sum from the first update on, so their responses are not compared."""
    first = next(iter(done.values()))
    reference = next((mode for mode in done.values() if mode.config.cluster.workers == workers), first)
    results = []
    for mode in done.values():
        same_size = mode.config.cluster.workers == reference.config.cluster.workers
        parted = compare(mode.name, reference.folder, mode.folder, mode.config) if same_size else Comparison(None)
        facts = {"compared_with": reference.name if same_size else None}
        results.append(mode.result(done.get("plain", first), done.get("frozen"), parted) | facts)
    for mode in done.values():
        shutil.rmtree(mode.folder / "checkpoints", ignore_errors=True)
        (mode.folder / RESPONSES).unlink()
    return results


def _print(console: Console, results: Sequence[dict[str, Any]]) -> None:
    """Print a table with a column for each mode."""

    def mean(row: dict[str, Any], phase: str) -> str:
        return f"{row['seconds'].get(phase, 0.0) / len(row['accept_length']):.2f}"

    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "workers": lambda row: str(row["workers"]),
        "a step (median)": lambda row: f"{row['step_seconds']:.2f}",
        "times faster than plain": lambda row: f"{row['faster_than_plain'][1]:.2f}",
        "... 95 % interval": lambda row: "{0:.2f}-{2:.2f}".format(*row["faster_than_plain"]),
        "times faster than frozen": lambda row: "{1:.2f}".format(*row["faster_than_frozen"] or (0, math.nan)),
        "rollout, against plain": lambda row: "{1:.2f}".format(*row["rollout_faster_than_plain"]),
        "rollout, against frozen": lambda row: "{1:.2f}".format(*row["rollout_faster_than_frozen"] or (0, math.nan)),
        "tokens seen ahead": lambda row: f"{statistics.fmean(row['seen_ahead']):.0%}",
        **{phase: partial(mean, phase=phase) for phase in ("rollout", "reward", "update", "sync", "other")},
        **{f"{phase}, all workers": partial(mean, phase=phase) for phase in ("ahead", "spot", "idle")},
        "accept length": lambda row: f"{statistics.fmean(row['accept_length']):.2f}",
        "... of the last step": lambda row: f"{row['accept_length'][-1]:.2f}",
        "policy sha256": lambda row: row["policy_sha256"][:8],
        "forks explained, not": lambda row: (
            f"{row['forks_explained']}, {row['forks_unexplained']}" if row["compared_with"] else "-"
        ),
    }
    table = Table("seconds", *(row["name"] for row in results))
    for title, cell in rows.items():
        table.add_row(title, *map(cell, results))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="TOML file, such as recipes/longtail.toml")
    parser.add_argument("--workers", type=int, default=2, help="processes of each run (default 2)")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run (default 30)")
    parser.add_argument("--modes", default=",".join(MODES), help="modes to run, in this order, comma-separated")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    asked, overrides = parser.parse_known_args(argv)
    modes = asked.modes.split(",")
    if min(asked.workers, asked.steps) < 1:
        parser.error("--workers and --steps must be at least 1")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"--modes: unknown mode {unknown[0]!r}, use {', '.join(MODES)}")
    try:
        bench_train(load_config(asked.recipe, overrides), asked.workers, asked.steps, modes, asked.json)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
