"""How much a decoding worker is slowed by its neighbour, which is idle, runs an empty loop, or trains the drafter.

    python bench/beside.py [recipes/longtail.toml] [--repeats 40] [--json FILE] [--section.key value ...]

The worker decodes the same long responses in every turn, one at a time as at the end of a rollout, with a fixed
strategy. The empty loop shows how much the machine slows one processor when the other one is busy with anything; what
training costs beyond that is due to training.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tlt.bench.rollout import ratio
from tlt.build import open_workplace
from tlt.cluster.worker import Slice, Work
from tlt.cluster.workers import RayPool, share_of_cores
from tlt.config import Config, load_config
from tlt.metrics import provenance, write_json
from tlt.sampling import make_requests
from tlt.types import Request

FIXED = {"drafter": "eagle", "depth": "8", "branching": "1", "verify_tokens": "9", "min_chance": "0"}
PROMPTS = 16  # prompts of each worker
LONGEST = 4  # responses that are decoded in each turn
SLICE = 1.0  # seconds of a call, as for a last row
LOOP = "import os, sys\nos.sched_setaffinity(0, map(int, sys.argv[1:]))\nwhile True: pass"


class Pair:
    """Worker 0 decodes, worker 1 is its neighbour."""

    def __init__(self, config: Config) -> None:
        self.pool, self.config = RayPool(config, config.model.path), config
        self.rollouts = self.spots = 0

    def decode(self, worker: int, requests: Sequence[Request], train: bool = False) -> list[Slice]:
        """Let a worker decode until all requests have ended; with `train`, worker 1 trains meanwhile."""
        self.rollouts += 1
        calls, slices = {"decode": self._decode(worker, requests)}, []
        while "decode" in calls:
            if train and "spot" not in calls:
                self.spots += 1
                calls["spot"] = self._train()
            for handle in self.pool.wait(list(calls.values())):
                name = next(name for name, call in calls.items() if call == handle)
                result = self.pool.result(calls.pop(name))
                if name == "spot":
                    assert result, "there is harvest to train on"
                else:
                    slices.append(result)
                    if result.live or result.waiting:
                        calls["decode"] = self._decode(worker)
        if "spot" in calls:
            self.pool.interrupt(1, self.spots)
            self.pool.wait([calls["spot"]])
        return slices

    def _train(self) -> Any:
        return self.pool.submit(1, "train_drafter", None, self.config.cluster.slice_seconds, self.spots)

    def _decode(self, worker: int, requests: Sequence[Request] = ()) -> Any:
        return self.pool.submit(worker, "decode", Work(self.rollouts, requests), SLICE)


@contextmanager
def empty_loop(cores: Sequence[int]) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", LOOP, *map(str, cores)])
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def measure(config: Config, repeats: int) -> dict[str, Any]:
    _, prompts, _, params = open_workplace(config)
    requests = make_requests(prompts[: 2 * PROMPTS], 8, params, 0, "beside")
    pair = Pair(config)
    try:
        pair.decode(1, requests[PROMPTS * 8 :])  # gives worker 1 its harvest
        for version in (1, 2):  # the drafter is trained on rollouts before the last one
            pair.pool.wait([pair.pool.submit(1, "sync", version)])
        answers = [response for done in pair.decode(0, requests[: PROMPTS * 8]) for response in done.responses]
        longest = sorted(answers, key=lambda response: -len(response.token_ids))[:LONGEST]
        neighbours = {
            "idle": (nullcontext, False),
            "empty loop": (lambda: empty_loop(share_of_cores(1, 2)), False),
            "training": (nullcontext, True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in neighbours}
        for repeat in range(repeats):
            for name in sorted(neighbours, reverse=repeat % 2 == 1):
                beside, train = neighbours[name]
                with beside():
                    began = time.perf_counter()
                    for response in longest:
                        pair.decode(0, [response.request], train)
                    seconds[name].append(time.perf_counter() - began)
    finally:
        pair.pool.close()
    return {
        "tokens": sum(len(response.token_ids) for response in longest),
        "repeats": repeats,
        "seconds": seconds,
        "median_seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "empty_loop_to_idle": ratio(seconds["empty loop"], seconds["idle"]),
        "training_to_idle": ratio(seconds["training"], seconds["idle"]),
        "training_to_empty_loop": ratio(seconds["training"], seconds["empty loop"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=Path("recipes/longtail.toml"))
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    fixed = [part for name, value in FIXED.items() for part in (f"--speculation.{name}", value)]
    with tempfile.TemporaryDirectory() as folder:
        own = ["--cluster.workers", "2", "--run.folder", folder]
        found = measure(load_config(arguments.recipe, [*overrides, *fixed, *own]), arguments.repeats)
    for name, value in found.items():
        if name != "seconds":
            print(name, value)
    if arguments.json:
        write_json(arguments.json, {**found, **provenance()})


if __name__ == "__main__":
    main()
