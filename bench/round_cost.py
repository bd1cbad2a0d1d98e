"""Times rounds with the learned drafter and plain ones, of this source tree and of another one, in turn.

    python bench/round_cost.py recipes/longtail.toml [--before OTHER/src] [--depths 1 2 4 8] [--json FILE]

Each tree has a process of its own. They take turns of one strategy at a time: rounds of one row, for the same responses
to the same prompts. The milliseconds of a strategy are the median of its turns' medians. `fixed` and `level` fit what
rounds with chains take beyond plain rounds by the line fixed + level * depth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SOURCE = Path(__file__).resolve().parent.parent / "src"
ROUNDS = 120  # rounds of a turn


def serve(recipe: str) -> None:
    """Serve one tree in a process: read the depth of a chain (0: plain), answer with milliseconds of a round."""
    import torch

    from tlt.config import load_config
    from tlt.draft.eagle import load_drafter
    from tlt.draft.learned import EagleDrafter
    from tlt.draft.strategy import PLAIN, Strategy
    from tlt.drafting import Workbench
    from tlt.engine.engine import Engine
    from tlt.engine.tuner import Fixed

    torch.set_num_threads(1)
    config = load_config(recipe)
    assert config.speculation.path, "the recipe names a drafter"
    bench = Workbench.of(config)
    layer = load_drafter(config.speculation.path, bench.target.options)
    longest = sorted(Engine(bench.target, config.engine).generate(bench.held_out), key=lambda r: -len(r.token_ids))
    print("ready", flush=True)
    for line in sys.stdin:
        depth = int(line)
        how = Strategy("eagle", depth, 1, depth + 1) if depth else PLAIN
        drafter = EagleDrafter(layer, bench.target)
        engine = Engine(bench.target, config.engine, [drafter], Fixed(how), layout=layer.options.layout)
        seconds: list[float] = []
        for response in longest:
            engine.start([response.request])
            engine.round()  # this round includes the prefill
            while engine.busy and len(seconds) < ROUNDS:
                began = time.perf_counter()
                engine.round()
                seconds.append(time.perf_counter() - began)
        print(1000 * statistics.median(seconds), flush=True)


def start(source: Path, recipe: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, recipe, "--serve"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n", "it says what went wrong"
    return process


def ask(process: subprocess.Popen[str], depth: int) -> float:
    assert process.stdin
    assert process.stdout
    process.stdin.write(f"{depth}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def summary(turns: dict[int, list[float]]) -> dict[str, Any]:
    rounds = {depth: statistics.median(found) for depth, found in turns.items()}
    depths = [depth for depth in rounds if depth]
    level, fixed = np.polyfit(depths, [rounds[depth] - rounds[0] for depth in depths], 1)
    return {"milliseconds": {str(d): ms for d, ms in rounds.items()}, "fixed": float(fixed), "level": float(level)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--before", type=Path, help="src/ of another tree")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.recipe)
    trees = {"before": arguments.before} if arguments.before else {}
    processes = {name: start(source, arguments.recipe) for name, source in (trees | {"now": SOURCE}).items()}
    turns: dict[str, dict[int, list[float]]] = {name: {d: [] for d in (0, *arguments.depths)} for name in processes}
    began = time.monotonic()
    while time.monotonic() - began < arguments.seconds:
        for depth in (0, *arguments.depths):
            for name, process in processes.items():
                turns[name][depth].append(ask(process, depth))
    for process in processes.values():
        process.communicate()
    results = {name: summary(found) for name, found in turns.items()}
    for name, found in results.items():
        rounds = ", ".join(
            f"{'plain' if d == '0' else f'chain of {d}'} {ms:.2f}" for d, ms in found["milliseconds"].items()
        )
        print(f"{name}: {rounds} ms a round; over plain {found['fixed']:.2f} ms and {found['level']:.2f} ms a level")
    if arguments.json:
        sys.path.insert(0, str(SOURCE))
        from tlt.metrics import provenance, write_json

        write_json(arguments.json, {"trees": results, **provenance()})


if __name__ == "__main__":
    main()
