"""How long workers take to come back from idle work when they are called back.

    python bench/callback.py [recipes/longtail.toml] [--workers 2] [--steps 10] [--json FILE] [--section.key value ...]

Every step ends with such a call: the rollout is over, and all workers are needed for the update. The time is measured
by the driver, from the call to the last answer. A call is not counted if no worker was busy with what it calls back.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from tlt.cluster.crew import Crew
from tlt.config import load_config
from tlt.metrics import provenance, write_json
from tlt.run.display import Display
from tlt.run.train import train


def measure(recipe: Path, workers: int, steps: int, overrides: list[str]) -> dict[str, Any]:
    latencies: list[float] = []
    wait_until_ended = Crew.wait_until_ended

    def timed_wait(self: Crew, methods: Collection[str], patience: float) -> None:
        busy = any(method in methods for index in range(self.size) for method in self.pending(index))
        began = time.perf_counter()
        wait_until_ended(self, methods, patience)
        if busy:
            latencies.append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--cluster.workers", str(workers), "--train.steps", str(steps), "--run.folder", folder + "/run"]
        fixed += ["--speculation.path", ""]  # a random drafter: one that was trained before would rest
        config = load_config(recipe, [*overrides, *fixed])
        with patch.object(Crew, "wait_until_ended", timed_wait):
            train(config, False, Display(Console(quiet=True)))
    return {"steps": steps, "workers": workers, "callback": _spread(latencies)}


def _spread(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"count": 0}
    return {"count": len(seconds), "median_seconds": statistics.median(seconds), "worst_seconds": max(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=Path("recipes/longtail.toml"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    found = measure(arguments.recipe, arguments.workers, arguments.steps, overrides)
    print(found)
    if arguments.json:
        write_json(arguments.json, {**found, **provenance()})


if __name__ == "__main__":
    main()
