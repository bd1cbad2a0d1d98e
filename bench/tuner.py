"""Measures how far the tuner is from the best choice in hindsight.

    python bench/tuner.py record RECIPE TABLES.json [--steps 20] [--cpu-time]     all strategies decode the same
    python bench/tuner.py simulate TABLES.json [--json FILE] [--seeds 20]     without torch

All strategies commit the same tokens. So a recording tells for every position of every response whether a drafter's
draft token there was accepted, and a simulated rollout may draft from wherever another strategy left off. The seconds
of a round are drawn from the recorded rounds of its strategy: the tuner learns from drawn seconds, and is charged their
medians. --cpu-time records CPU time instead of wall-clock time, because other processes hardly change it.
The best choice in hindsight is, for each bucket, the strategy that was fastest there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.choice import Adaptive, context_class, size_class, strategies
from tlt.engine.tuner import Fixed, RoundResult
from tlt.metrics import provenance, write_json

_ENOUGH = 5  # least number of rounds with a number of rows, for a median


def record(recipe: Path, out: Path, steps: int) -> None:
    from tlt.build import open_workplace
    from tlt.config import load_config
    from tlt.engine.drafters import make_drafters
    from tlt.engine.engine import Engine
    from tlt.sampling import make_requests

    config = load_config(recipe)
    _, prompts, target, params = open_workplace(config)
    each = config.rollout.prompts_per_step
    known = {drafter.name: drafter.acceptance_rate for drafter in make_drafters(config.speculation, target)[0]}
    tables = []
    for arm in strategies(known):
        drafters, layout = make_drafters(config.speculation, target)
        tuner = Recorder(arm)
        engine = Engine(target, config.engine, drafters if arm != PLAIN else [], tuner, layout=layout)
        texts = []
        for step in range(steps):
            engine.start(())
            mine = prompts[step * each : (step + 1) * each]
            asked = make_requests(mine, config.rollout.group_size, params, 1, "tuner")
            engine.submit(asked)
            lengths: dict[int, list[int]] = {request.seed: [0] for request in asked}
            while engine.busy:
                for response in engine.round():
                    lengths[response.request.seed].append(len(response.token_ids))
                for row in engine.rows:
                    lengths[row.request.seed].append(len(row.tokens))
            texts.append(list(lengths.values()))
        print(f"{arm.name}: {sum(response[-1] for text in texts for response in text):,} tokens", flush=True)
        tables.append({"strategy": list(arm), "rounds": tuner.rounds, "texts": texts})
    write_json(out, {"chances": known, "tables": tables, **provenance()})


class Recorder(Fixed):
    """Keeps the number of rows, the seconds, those of the draft, and the tokens of the pass, of every scored round."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.rounds: list[tuple[int, float, float, int]] = []

    def record(self, result: RoundResult) -> None:
        if result.scored:
            self.rounds.append((len(result.tokens), result.seconds, result.drafting, result.computed))


# -- what was recorded -------------------------------------------------------------------------------------------------


class Timed(NamedTuple):
    """Seconds of a round, those of its draft, and the tokens of its pass."""

    seconds: float
    drafting: float
    computed: int


class World(NamedTuple):
    rounds: dict[Strategy, dict[int, list[Timed]]]
    """rounds by strategy and number of rows"""
    right: dict[str, list[list[list[bool]]]]
    """drafter -> [step][response][position] whether its draft token was accepted"""
    chances: dict[str, float]
    """acceptance rate of each drafter's first draft token, as known before"""
    where: dict[str, Any]
    """machine, versions and commit of the recording, to which its seconds belong"""

    def typical(self, arm: Strategy, rows: int) -> float:
        known = sorted(self.rounds[arm])
        medians = [statistics.median(timed.seconds for timed in self.rounds[arm][at]) for at in known]
        return float(np.interp(rows, known, medians))

    def draw(self, arm: Strategy, rows: int, rng: random.Random) -> Timed:
        """Return a recorded round with the nearest number of rows, scaled to this number."""
        near = min(self.rounds[arm], key=lambda known: abs(known - rows))
        one, scale = rng.choice(self.rounds[arm][near]), self.typical(arm, rows) / self.typical(arm, near)
        return Timed(one.seconds * scale, one.drafting * scale, max(rows, round(one.computed * rows / near)))

    def commits(self, arm: Strategy, step: int, response: int, at: int) -> int:
        if arm == PLAIN:
            return 1
        ahead = self.right[arm.drafter][step][response][at:]
        return min(next((i for i, right in enumerate(ahead[: arm.depth]) if not right), arm.depth) + 1, len(ahead))


def read(path: Path) -> World:
    """Read a recording. The deepest arm of a drafter shows which tokens are accepted: a rejected one ends a round.
    The target's own token behind a chain that was right to its end counts as an accepted draft token."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    tables = {Strategy(*t["strategy"]): t for t in recorded["tables"]}
    rounds: dict[Strategy, dict[int, list[Timed]]] = {}
    for arm, table in tables.items():
        by_rows: dict[int, list[Timed]] = {}
        for rows, *timed in table["rounds"]:
            by_rows.setdefault(rows, []).append(Timed(*timed))
        rounds[arm] = {rows: timed for rows, timed in by_rows.items() if len(timed) >= _ENOUGH}
    deepest = {arm.drafter: arm for arm in sorted(tables, key=lambda arm: arm.depth)}
    right = {
        drafter: [[_right(response, arm.depth) for response in text] for text in tables[arm]["texts"]]
        for drafter, arm in deepest.items()
        if arm != PLAIN
    }
    where = {key: recorded[key] for key in ("machine", "versions", "commit")}
    chances = {name: chance for name, chance in recorded["chances"].items() if chance is not None}
    return World(rounds, right, chances, where)


def _right(lengths: Sequence[int], depth: int) -> list[bool]:
    out: list[bool] = []
    for before, after in pairwise(lengths):
        out += [True] * (after - before - 1) + [after - before > depth]
    return out


# -- the simulation ----------------------------------------------------------------------------------------------------

Choose = Callable[[int, float], Strategy]
Learn = Callable[[Strategy, Timed, list[int]], None]
Bucket = tuple[int, int]


class Round(NamedTuple):
    step: int
    bucket: Bucket
    seconds: float
    tokens: int
    """tokens committed by all rows"""


def bucket_of(rows: int, context: float) -> Bucket:
    return size_class(rows), context_class(context)


def play(world: World, choose: Choose, learn: Learn = lambda *_: None, rng: random.Random | None = None) -> list[Round]:
    rng, rounds = rng or random.Random(0), []
    for step, responses in enumerate(next(iter(world.right.values()))):
        at = [0] * len(responses)
        while live := [i for i, response in enumerate(responses) if at[i] < len(response)]:
            rows, context = len(live), statistics.fmean(at[i] for i in live)
            arm = choose(rows, context)
            tokens = [world.commits(arm, step, i, at[i]) for i in live]
            learn(arm, world.draw(arm, rows, rng), tokens)
            rounds.append(Round(step, bucket_of(rows, context), world.typical(arm, rows), sum(tokens)))
            for i, more in zip(live, tokens, strict=True):
                at[i] += more
    return rounds


def spent(rounds: Iterable[Round]) -> float:
    return sum(turn.seconds for turn in rounds)


def first(rounds: Iterable[Round]) -> float:
    """Seconds of the first rollout."""
    return spent(turn for turn in rounds if turn.step == 0)


def hindsight(world: World) -> tuple[dict[str, list[Round]], float]:
    """Rounds of a run with each strategy alone, and seconds of one with the best strategy of each bucket."""
    alone: dict[str, list[Round]] = {}
    speeds: dict[Bucket, dict[Strategy, float]] = {}
    for arm in world.rounds:
        rounds = alone[arm.name] = play(world, lambda *_, arm=arm: arm)
        for bucket in {turn.bucket for turn in rounds}:
            there = [turn for turn in rounds if turn.bucket == bucket]
            speeds.setdefault(bucket, {})[arm] = sum(turn.tokens for turn in there) / spent(there)
    best = {bucket: max(by_arm, key=lambda arm: by_arm[arm]) for bucket, by_arm in speeds.items()}
    return alone, spent(play(world, lambda *at: best[bucket_of(*at)]))


def tuned(world: World, seed: int) -> list[Round]:
    """Rounds of a run with the tuner, which knows nothing at its start but the acceptance rates in `world.chances`."""
    tuner, drafters = Adaptive(world.rounds, world.chances), {arm.drafter for arm in world.rounds}
    return play(
        world,
        lambda rows, context: tuner.choose(rows, context, drafters),
        lambda arm, timed, tokens: tuner.record(RoundResult(arm, *timed, tokens, scored=True)),
        random.Random(seed),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True, dest="what")
    recording = kinds.add_parser("record")
    recording.add_argument("recipe", type=Path)
    recording.add_argument("tables", type=Path)
    recording.add_argument("--steps", type=int, default=20)
    recording.add_argument("--cpu-time", action="store_true")
    simulating = kinds.add_parser("simulate")
    simulating.add_argument("tables", type=Path)
    simulating.add_argument("--json", type=Path)
    simulating.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.what == "record":
        if arguments.cpu_time:
            time.perf_counter = time.process_time
        record(arguments.recipe, arguments.tables, arguments.steps)
        return
    world = read(arguments.tables)
    rounds, best = hindsight(world)
    alone = {name: spent(turns) for name, turns in rounds.items()}
    runs = [tuned(world, seed) for seed in range(arguments.seeds)]
    totals = [spent(run) for run in runs]
    plain, fixed = alone[PLAIN.name], min(alone, key=lambda name: alone[name])
    result: dict[str, Any] = {
        "steps": len(next(iter(world.right.values()))),
        "seconds": alone,
        "best_fixed": fixed,
        "time_to_best_of_each_bucket": [t / best for t in totals],
        "time_to_best_fixed": [t / alone[fixed] for t in totals],
        "faster_than_plain": [plain / t for t in totals],
        "faster_than_plain_in_the_first_rollout": [first(rounds[PLAIN.name]) / first(run) for run in runs],
        **world.where,
    }
    for name in [name for name in result if name.startswith(("time_to", "faster"))]:
        values = sorted(result[name])
        print(f"{name}: median {statistics.median(values):.3f}, {values[0]:.3f} to {values[-1]:.3f}")
    if arguments.json:
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
