"""Resident memory of the driver, two workers and whatever else a run has started, every 50 of 1,000 steps.

    python bench/memory_of_run.py [--steps 1000] [--json FILE]

The model is tiny, so that memory kept from step to step shows. The drafter trains in each idle moment and is published
again and again, workers decode ahead, and the run saves and evaluates. Stores that are kept up to a bound have small
bounds here, so that they are soon full: by default the suffix drafter alone keeps 200,000 tokens, some 60 MiB. The
slope is fitted to the later three quarters of the steps, by least squares.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from disturbed import DisturbedRun, command_of, processes_of, recipe_of, rewards_of

from tlt.metrics import provenance, read_metrics, write_json

_EVERY = 50  # steps between two samples
_WARM = 0.25  # fraction of the steps that the slope leaves out
_KEPT = {"history_tokens": 2000, "look_ahead_tokens": 20_000, "buffer_tokens": 2000}


def processes(driver: int) -> dict[str, int]:
    """Process ids by name; processes of one name are numbered in order of their ids."""
    found = {"driver": driver} | {f"reward {i}": pid for i, pid in enumerate(rewards_of(driver))}
    names = {"ray::Actor": "worker", "gcs_server": "gcs_server", "raylet": "raylet"}
    counts: dict[str, int] = defaultdict(int)
    for pid in sorted(processes_of(driver)):
        command = command_of(pid)
        name = next((name for word, name in names.items() if word in command.split(" ")[0]), "other")
        found[f"{name} {counts[name]}"] = pid
        counts[name] += 1
    return found


def mebibytes(pid: int) -> float:
    """MiB of resident memory that is not shared with other processes; libraries and Ray's store are shared."""
    info = psutil.Process(pid).memory_info()
    return (info.rss - info.shared) / 2**20


def watch(run: DisturbedRun) -> list[dict[str, float]]:
    """Take a sample every `_EVERY` steps, until the run has ended."""
    samples: list[dict[str, float]] = []
    while not run.has_ended():
        step = run.last_step()
        if step >= len(samples) * _EVERY:
            sample = {"step": float(step)}
            for name, pid in processes(run.process.pid).items():
                with suppress(psutil.Error):
                    sample[name] = mebibytes(pid)
            samples.append(sample)
        time.sleep(0.1)
    return samples


def growth(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """For each process that was there to the end: MiB at first and at last, and the slope in MiB per 1,000 steps."""
    late = [sample for sample in samples if sample["step"] >= _WARM * samples[-1]["step"]]
    found = {}
    for name in samples[-1]:
        seen = [(sample["step"], sample[name]) for sample in late if name in sample]
        if name != "step" and len(seen) > 2:
            slope = statistics.linear_regression(*zip(*seen, strict=True)).slope
            found[name] = {"first": samples[0].get(name, 0.0), "last": seen[-1][1], "slope": 1000 * slope}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(Path(folder), "whole weights", arguments.steps, **_KEPT)
        run = DisturbedRun(recipe, Path(folder) / "run", ("--run.save_every", "20"))
        run.start()
        samples = watch(run)
        if run.process.returncode != 0:
            raise RuntimeError(run.note_end())
        lines = read_metrics(run.folder)
        last = lines[-1]["rollout"]
        did: dict[str, Any] = {
            "steps": len(lines),
            "seconds": sum(line["seconds"]["total"] for line in lines),
            "drafter_version": last["spot"].get("version", 0),
            "drafter_tokens": sum(line["rollout"].get("drafter_tokens", 0) for line in lines),
            "ahead_tokens": sum(line["rollout"].get("ahead_tokens", 0) for line in lines),
        }
    found = growth(samples)
    print(did)
    for name, of in found.items():
        print(f"{name}: {of['first']:.1f} MiB at first, {of['last']:.1f} at last, {of['slope']:+.2f} per 1,000 steps")
    if arguments.json:
        write_json(arguments.json, {"run": did, "growth": found, "samples": samples, **provenance()})


if __name__ == "__main__":
    main()
