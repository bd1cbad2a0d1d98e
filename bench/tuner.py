"""How far the tuner is from the best choice in hindsight.

    python bench/tuner.py record RECIPE TABLES.json     rounds of every strategy on the recipe's prompts, as they came
    python bench/tuner.py simulate TABLES.json [--json FILE] [--seeds 20]     without torch

A simulated rollout goes through the live rows of the recorded plain rollout, round by round; each round draws its
seconds and tokens at random from what the picked strategy was recorded with at those rows. Regret is the time taken
above that of the strategy that is best in each bucket on average, knowing the tables.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.tuner import Bandit, Bucket, Fixed, bucket_of, strategies

Table = dict[Bucket, dict[Strategy, list[tuple[float, float]]]]
"""seconds of a round, and tokens a row"""


class Recorder(Fixed):
    """Keeps what every round took and gave."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.rounds: list[tuple[int, float, float, int]] = []
        self._now = (1, 1.0)

    def choose(self, rows: int, context: float, usable: Collection[str]) -> Strategy:
        self._now = (rows, context)
        return super().choose(rows, context, usable)

    def record(self, strategy: Strategy, seconds: float, tokens: int, scored: bool) -> None:
        if scored:
            rows, context = self._now
            self.rounds.append((rows, context, seconds, tokens))


def record(recipe: Path, out: Path) -> None:
    from tlt.cluster.local import make_drafters, open_workplace
    from tlt.config import load_config
    from tlt.engine.engine import Engine
    from tlt.metrics import provenance, write_json
    from tlt.sampling import request_seed
    from tlt.types import Request

    config = load_config(recipe)
    _, prompts, target, params = open_workplace(config)
    requests = [
        Request(p, k, 0, request_seed(1, "tuner", p.prompt_id, 0, k), params) for p in prompts[:8] for k in range(8)
    ]
    names = [drafter.name for drafter in make_drafters(config.speculation, target)[0]]
    tables = []
    for arm in strategies(names):
        for rows in (64, 8, 1):
            drafters, layout = make_drafters(config.speculation, target)
            engine = config.engine.model_copy(update={"max_rows": rows})
            recorder = Recorder(arm)
            decoder = Engine(target, engine, drafters if arm != PLAIN else [], recorder, layout=layout)
            for _ in decoder.generate(requests if rows > 1 else requests[::8]):
                pass
            tables.append({"strategy": list(arm), "max_rows": rows, "rounds": recorder.rounds})
    write_json(out, {"tables": tables, **provenance()})


def read_tables(path: Path) -> tuple[Table, list[tuple[int, float]]]:
    """The rounds by bucket and strategy; and rows and context of the plain rollout's rounds."""
    tables: Table = {}
    course: list[tuple[int, float]] = []
    for table in json.loads(path.read_text(encoding="utf-8"))["tables"]:
        arm = Strategy(*table["strategy"])
        for rows, context, seconds, tokens in table["rounds"]:
            tables.setdefault(bucket_of(rows, context), {}).setdefault(arm, []).append((seconds, tokens / rows))
        if arm == PLAIN and table["max_rows"] == 64:
            course = [(rows, context) for rows, context, *_ in table["rounds"]]
    return tables, course


def speed(rounds: Sequence[tuple[float, float]]) -> float:
    return sum(tokens for _, tokens in rounds) / sum(seconds for seconds, _ in rounds)


def simulate(tables: Table, course: Sequence[tuple[int, float]], rollouts: int, seed: int) -> list[dict[str, float]]:
    """Time of each rollout against plain and against the best of each bucket; the tuner learns from one to the next."""
    arms = sorted({arm for bucket in tables.values() for arm in bucket}, key=lambda arm: arm != PLAIN)
    known = {b: arms_ for b, arms_ in tables.items() if len(arms_) == len(arms)}
    profile: dict[int, dict[Strategy, float]] = {}
    for bucket in sorted(known):  # what a start-up profile would say: medians, a fifth off in any direction
        noisy = random.Random(f"{seed} {bucket}")
        costs = {a: statistics.median(s for s, _ in r) * noisy.uniform(0.8, 1.2) for a, r in known[bucket].items()}
        profile.setdefault(2**bucket.rows, costs)
    rng, bandit, out = random.Random(seed), Bandit(arms, profile, seed=seed), []
    best = {bucket: max(rounds, key=lambda arm: speed(rounds[arm])) for bucket, rounds in known.items()}
    course = [at for at in course if bucket_of(*at) in known]
    for _ in range(rollouts):
        taken = dict.fromkeys(("tuner", "best", "plain"), 0.0)
        left = 0.0  # rounds of the plain rollout that one round of the tuner is worth are skipped
        for rows, context in course:
            bucket = bucket_of(rows, context)
            taken["plain"] += 1 / speed(known[bucket][PLAIN])
            taken["best"] += 1 / speed(known[bucket][best[bucket]])
            left -= 1.0
            while left < 0:
                arm = bandit.choose(rows, context, {a.drafter for a in arms})
                seconds, tokens = rng.choice(known[bucket][arm])
                bandit.record(arm, seconds, round(tokens * rows), scored=True)
                taken["tuner"] += seconds
                left += tokens
        out.append(taken)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True, dest="what")
    recording = kinds.add_parser("record")
    recording.add_argument("recipe", type=Path)
    recording.add_argument("tables", type=Path)
    simulating = kinds.add_parser("simulate")
    simulating.add_argument("tables", type=Path)
    simulating.add_argument("--json", type=Path)
    simulating.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.what == "record":
        record(arguments.recipe, arguments.tables)
        return
    tables, course = read_tables(arguments.tables)
    runs = [simulate(tables, course, rollouts=6, seed=seed) for seed in range(arguments.seeds)]
    result: dict[str, Any] = {"rollouts": []}
    for i in range(6):
        against = {name: [run[i]["tuner"] / run[i][name] for run in runs] for name in ("best", "plain")}
        row = {f"time_to_{name}": statistics.median(values) for name, values in against.items()}
        row |= {f"worst_to_{name}": max(values) for name, values in against.items()}
        result["rollouts"].append(row)
        print(f"rollout {i + 1}: " + ", ".join(f"{key} {value:.3f}" for key, value in row.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
