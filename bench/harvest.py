"""Cost of training data to the rollout: two engines decode the same tokens with plain decoding, round by round in turn,
and one of them keeps features and gives them to a harvest buffer.

    python bench/harvest.py recipes/longtail.toml [--json FILE]

Nothing is drafted and no drafter reads the features, so the difference is the cost of the harvest alone. Rounds take a
few milliseconds and alternate, so what else the machine does slows both engines.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlt.commands.drafting import Workbench
from tlt.config import load_config
from tlt.draft.eagle import eagle_options
from tlt.engine.engine import Engine
from tlt.metrics import provenance, write_json
from tlt.spot.buffer import HarvestBuffer
from tlt.types import Request, Response

LENGTHS = {"short": 48, "long": 640}
"""tokens of every response; of short ones there are four times as many as rows"""
BATCHES = (1, 8, 32)
BLOCK = 64  # rounds of a paired comparison


def requests(bench: Workbench, batch: int, length: int) -> list[Request]:
    count = batch * (4 if length == LENGTHS["short"] else 1)
    source = bench.train * (1 + count // len(bench.train))
    return [
        replace(r, seed=i, sampling=replace(r.sampling, max_new_tokens=length, stop_token_ids=(), stop_strings=()))
        for i, r in enumerate(source[:count])
    ]


def rounds(engine: Engine, asked: list[Request], seen: list[Response]) -> Iterator[tuple[float, float]]:
    """Yield wall-clock and CPU seconds of each round; the first include the start of the rollout."""
    began, cpu = time.perf_counter(), time.process_time()
    engine.start(asked)
    while engine.busy:
        seen += engine.round()
        yield time.perf_counter() - began, time.process_time() - cpu
        began, cpu = time.perf_counter(), time.process_time()


def compare(bench: Workbench, batch: int, length: int) -> dict[str, Any]:
    asked, drafter = requests(bench, batch, length), bench.config.speculation
    config = bench.config.engine.model_copy(update={"max_rows": batch})
    buffer = HarvestBuffer(drafter.training.buffer_tokens)
    layout = eagle_options(bench.target.options, drafter.kind, drafter.window).layout
    engines = (Engine(bench.target, config), Engine(bench.target, config, layout=layout, on_harvest=buffer.add))
    seen: tuple[list[Response], list[Response]] = ([], [])
    turns = [rounds(engine, asked, answers) for engine, answers in zip(engines, seen, strict=True)]
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    while engines[0].stats.rounds == 0 or engines[0].busy:
        for side in (0, 1) if len(taken[0]) % 2 else (1, 0):
            taken[side].append(next(turns[side]))
    plain, kept = ({response.request.seed: response.token_ids for response in answers} for answers in seen)
    assert plain == kept, "the same tokens"
    wall, cpu = ([[time[which] for time in side] for side in taken] for which in (0, 1))
    return {
        "batch": batch,
        "response_tokens": length,
        "tokens": sum(map(len, plain.values())),
        "rounds": len(wall[0]),
        "entries_harvested": buffer.tokens,
        "seconds_plain": sum(wall[0]),
        "seconds_with_harvest": sum(wall[1]),
        "overhead": sum(wall[1]) / sum(wall[0]) - 1,
        "overhead_of_blocks": statistics.median(_blocks(wall)) - 1,
        "overhead_processor": sum(cpu[1]) / sum(cpu[0]) - 1,
    }


def _blocks(sides: list[list[float]]) -> list[float]:
    plain, kept = ([sum(side[i : i + BLOCK]) for i in range(0, len(side), BLOCK)] for side in sides)
    return [b / a for a, b in zip(plain, kept, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench = Workbench.of(load_config(arguments.recipe))
    compare(bench, 2, 8)  # warm up
    rows = []
    for name, length in LENGTHS.items():
        for batch in BATCHES:
            row = compare(bench, batch, length)
            rows.append({"responses": name, **row})
            print(
                f"{name} responses, batch {batch}: {row['overhead']:+.1%}, median of blocks "
                f"{row['overhead_of_blocks']:+.1%}, processor {row['overhead_processor']:+.1%} "
                f"({row['seconds_plain']:.2f} s plain)"
            )
    if arguments.json:
        write_json(arguments.json, {"cases": rows, **provenance()})


if __name__ == "__main__":
    main()
