"""How fast a drafter learns from random weights: accept length of chains of 6 after given seconds of spot training.

    OMP_NUM_THREADS=1 python bench/drafter_learning.py recipes/longtail.toml [--seeds 3] [--seconds 10 30 60 120]
        [--tokens 60000] [--json FILE]

Seconds are CPU time of one thread, so that they do not depend on what else the machine does. Every seed has its own
random weights and its own order of the same harvest. The accept length, on held-out prompts, is that of the drafter
that would be published: the one of the last stretch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from tlt.config import load_config
from tlt.draft.buffer import Harvest
from tlt.draft.eagle import EagleLayer, eagle_options
from tlt.draft.schedule import RULE
from tlt.draft.spot import SpotTrainer
from tlt.draft.strategy import Strategy
from tlt.drafting import Workbench, evaluate, harvest
from tlt.metrics import provenance, write_json
from tlt.progress import shown

CHAIN = Strategy("eagle", 6, 1, 7)


def fresh_layer(bench: Workbench, seed: int) -> EagleLayer:
    torch.manual_seed(seed)
    return EagleLayer(eagle_options(bench.target.options, "eagle1", bench.config.speculation.window))


def learn(bench: Workbench, items: list[Harvest], seed: int, points: list[float]) -> list[dict[str, Any]]:
    """Train with one seed; returns a row for each point in time."""
    room = {"buffer_tokens": 8 * sum(len(item.tokens) for item in items)}
    config = bench.config.speculation.training.model_copy(update=room)
    spot = SpotTrainer(fresh_layer(bench, seed), bench.target, config, seed)
    for item in items:
        spot.harvest(item)
    for _ in range(2):  # drafters are judged on the last rollout, and trained on those before it
        spot.target_moved()
    rows, spent, micro_batches, candidate = [], 0.0, 0, spot.state()
    for point in points:
        began = time.process_time()
        while spent + time.process_time() - began < point:
            micro_batches += spot.train(0.0).micro_batches
            if micro_batches % RULE.stretch == 0:
                candidate = spot.state()
        spent += time.process_time() - began
        assert candidate, "of training that is finite"
        result = evaluate(bench, spot.publish(candidate, None), CHAIN)
        rows.append(
            {"seed": seed, "seconds": point, "micro_batches": micro_batches, "accept_length": result["accept_length"]}
        )
        print(f"seed {seed}, {point:g} s: {micro_batches} micro-batches, {result['accept_length']:.2f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, nargs="+", default=[10, 30, 60, 120])
    parser.add_argument("--tokens", type=int, default=60_000, help="of harvest")
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    bench = Workbench.of(load_config(arguments.recipe, overrides))
    with shown():
        items = harvest(bench, fresh_layer(bench, 0), arguments.tokens).items
    rows = [row for seed in range(arguments.seeds) for row in learn(bench, items, seed, arguments.seconds)]
    means = {
        f"{point:g}": statistics.fmean(row["accept_length"] for row in rows if row["seconds"] == point)
        for point in arguments.seconds
    }
    print("mean accept length: " + ", ".join(f"{mean:.2f} at {point} s" for point, mean in means.items()))
    if arguments.json:
        write_json(arguments.json, {"mean": means, "rows": rows, "overrides": overrides, **provenance()})


if __name__ == "__main__":
    main()
