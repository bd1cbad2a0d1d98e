"""Seconds of a round and accept length of plain decoding and of fixed chains of each drafter, by batch.

    python bench/strategies.py RECIPE [--batches 1 2 4 8 16 32] [--depths 2 4] [--chances 0.3] [--drafters NAME ...]
        [--rounds 60] [--json FILE] [--section.key value]

Each strategy decodes the first rounds of the same requests, two responses per prompt, all in one batch. A round counts
while at least three quarters of the rows are active. Speed is tokens per row and second, relative to plain decoding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measuring import Results

from tlt.build import open_workplace
from tlt.config import load_config
from tlt.draft.choose import make_drafters
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.sampling import make_requests


def main(words: Sequence[str] | None = None) -> int:
    """Measure all strategies. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--chances", type=float, nargs="+", default=[0.3], help="smallest chance of a draft token")
    parser.add_argument("--drafters", nargs="+", help="default: all that work")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args(words)
    config = load_config(arguments.recipe, overrides)
    _, prompts, target, params = open_workplace(config)
    results = Results(arguments.json, dtype=config.model.dtype)
    names = arguments.drafters or [drafter.name for drafter in make_drafters(config.speculation, target)[0]]
    chains = [
        Strategy(name, depth, chance) for name in names for depth in arguments.depths for chance in arguments.chances
    ]
    for batch in arguments.batches:
        requests = make_requests(prompts[: -(-batch // 2)], 2, params, config.run.seed, "strategies")[:batch]

        def measure(strategy: Strategy, batch: int = batch, requests: Any = requests) -> dict[str, Any]:
            drafters, layout = make_drafters(config.speculation, target)
            fits = config.engine.model_copy(update={"max_rows": batch})
            engine = Engine(target, fits, drafters, Fixed(strategy), layout=layout)
            engine.start(requests)
            seconds, accepted = rounds(engine, batch, arguments.rounds)
            plain = [case for case in results.cases if case["batch"] == batch and case["strategy"] == PLAIN.name]
            before = plain[0]["milliseconds"] / 1000 if plain else seconds
            return {
                "milliseconds": 1000 * seconds,
                "accept_length": accepted,
                "times_plain": accepted * before / seconds,
            }

        for strategy in (PLAIN, *chains):
            results.measure({"batch": batch, "strategy": strategy.name}, partial(measure, strategy))
    return int(results.failed)


def rounds(engine: Engine, batch: int, count: int) -> tuple[float, float]:
    """Return the median seconds of a round, and the mean tokens per row. The first round, with its prefill, does not
    count."""
    seconds, tokens = list[float](), list[float]()
    engine.round()
    while engine.busy and len(seconds) < count and len(engine.rows) >= 0.75 * batch:
        rows, before, began = len(engine.rows), engine.stats.tokens, time.perf_counter()
        engine.round()
        seconds.append(time.perf_counter() - began)
        tokens.append((engine.stats.tokens - before) / rows)
    return statistics.median(seconds), statistics.fmean(tokens)


if __name__ == "__main__":
    sys.exit(main())
