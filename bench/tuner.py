"""Measures how far the tuner is from the best choice in hindsight.

    python bench/tuner.py record RECIPE TABLES.json [--steps 20]     every strategy decodes the same responses
    python bench/tuner.py simulate TABLES.json [--json FILE] [--seeds 20]     without torch

All strategies commit the same tokens. So a recording tells for every position of every response whether a drafter's
draft token there was accepted, and a simulated rollout may draft from wherever another strategy left off. The seconds
of a round are drawn from the recorded rounds of its strategy: the tuner learns from drawn seconds, and is charged their
medians.
The best choice in hindsight is, for each bucket, the strategy that was fastest there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.bandit import Bandit, strategies
from tlt.engine.estimates import Bucket, bucket_of, interpolate
from tlt.engine.tuner import Fixed, RoundResult
from tlt.metrics import provenance, write_json

_ENOUGH = 5  # least number of rounds with a number of rows, for a median


def record(recipe: Path, out: Path, steps: int) -> None:
    from tlt.build import open_workplace
    from tlt.config import load_config
    from tlt.draft.choose import make_drafters
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
    """Keeps the number of rows and the seconds of every scored round."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.rounds: list[tuple[int, float]] = []

    def record(self, result: RoundResult) -> None:
        if result.scored:
            self.rounds.append((len(result.tokens), result.seconds))


# -- what was recorded -------------------------------------------------------------------------------------------------


class World(NamedTuple):
    seconds: dict[Strategy, dict[int, list[float]]]
    """seconds of rounds, by strategy and number of rows"""
    right: dict[str, list[list[list[bool]]]]
    """drafter -> [step][response][position] whether its draft token was accepted"""
    chances: dict[str, float]
    """acceptance rate of each drafter's first draft token, as known before"""
    where: dict[str, Any]
    """machine, versions and commit of the recording, to which its seconds belong"""

    def typical(self, arm: Strategy, rows: int) -> float:
        return interpolate({at: statistics.median(taken) for at, taken in self.seconds[arm].items()}, rows)

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
    seconds: dict[Strategy, dict[int, list[float]]] = {}
    for arm, table in tables.items():
        by_rows: dict[int, list[float]] = {}
        for rows, taken in table["rounds"]:
            by_rows.setdefault(rows, []).append(taken)
        seconds[arm] = {rows: taken for rows, taken in by_rows.items() if len(taken) >= _ENOUGH}
    deepest = {arm.drafter: arm for arm in sorted(tables, key=lambda arm: arm.depth)}
    right = {
        drafter: [[_right(response, arm.depth) for response in text] for text in tables[arm]["texts"]]
        for drafter, arm in deepest.items()
        if arm != PLAIN
    }
    where = {key: recorded[key] for key in ("machine", "versions", "commit")}
    chances = {name: chance for name, chance in recorded["chances"].items() if chance is not None}
    return World(seconds, right, chances, where)


def _right(lengths: Sequence[int], depth: int) -> list[bool]:
    out: list[bool] = []
    for before, after in pairwise(lengths):
        out += [True] * (after - before - 1) + [after - before > depth]
    return out


# -- the simulation ----------------------------------------------------------------------------------------------------

Choose = Callable[[int, float], Strategy]
Learn = Callable[[Strategy, float, list[int]], None]
Round = tuple[Bucket, float, int]
"""bucket, seconds, and tokens committed by all rows"""


def play(world: World, choose: Choose, learn: Learn = lambda *_: None, rng: random.Random | None = None) -> list[Round]:
    rng, rounds = rng or random.Random(0), []
    for step, responses in enumerate(next(iter(world.right.values()))):
        at = [0] * len(responses)
        while live := [i for i, response in enumerate(responses) if at[i] < len(response)]:
            rows, context = len(live), statistics.fmean(at[i] for i in live)
            arm = choose(rows, context)
            tokens = [world.commits(arm, step, i, at[i]) for i in live]
            typical = world.typical(arm, rows)
            near = world.seconds[arm][min(world.seconds[arm], key=lambda known: abs(known - rows))]
            learn(arm, typical * rng.choice(near) / statistics.median(near), tokens)
            rounds.append((bucket_of(rows, context), typical, sum(tokens)))
            for i, more in zip(live, tokens, strict=True):
                at[i] += more
    return rounds


def spent(rounds: Sequence[Round]) -> float:
    return sum(seconds for _, seconds, _ in rounds)


def hindsight(world: World) -> tuple[dict[str, float], float]:
    """Seconds of a run with each strategy alone, and of one with the best strategy of each bucket."""
    alone: dict[str, float] = {}
    speeds: dict[Bucket, dict[Strategy, float]] = {}
    for arm in world.seconds:
        rounds = play(world, lambda *_, arm=arm: arm)
        alone[arm.name] = spent(rounds)
        for bucket in {bucket for bucket, *_ in rounds}:
            there = [turn for turn in rounds if turn[0] == bucket]
            speeds.setdefault(bucket, {})[arm] = sum(tokens for *_, tokens in there) / spent(there)
    best = {bucket: max(by_arm, key=lambda arm: by_arm[arm]) for bucket, by_arm in speeds.items()}
    return alone, spent(play(world, lambda *at: best[bucket_of(*at)]))


def tuned(world: World, seed: int) -> float:
    """Seconds of a run with the tuner, whose start-up profile is off by up to 7 %."""
    rng = random.Random(seed)
    profile = {
        rows: {arm: world.typical(arm, rows) * rng.uniform(0.93, 1.07) for arm in world.seconds}
        for rows in (1, 2, 4, 8, 16, 32, 64)
    }
    bandit = Bandit(world.seconds, lambda: profile, world.chances)
    drafters = {arm.drafter for arm in world.seconds}
    return spent(
        play(
            world,
            lambda rows, context: bandit.choose(rows, context, drafters),
            lambda arm, seconds, tokens: bandit.record(RoundResult(arm, seconds, tokens, scored=True)),
            rng,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True, dest="what")
    recording = kinds.add_parser("record")
    recording.add_argument("recipe", type=Path)
    recording.add_argument("tables", type=Path)
    recording.add_argument("--steps", type=int, default=20)
    simulating = kinds.add_parser("simulate")
    simulating.add_argument("tables", type=Path)
    simulating.add_argument("--json", type=Path)
    simulating.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.what == "record":
        record(arguments.recipe, arguments.tables, arguments.steps)
        return
    world = read(arguments.tables)
    alone, best = hindsight(world)
    totals = [tuned(world, seed) for seed in range(arguments.seeds)]
    plain, fixed = alone[PLAIN.name], min(alone, key=lambda name: alone[name])
    result: dict[str, Any] = {
        "steps": len(next(iter(world.right.values()))),
        "seconds": alone,
        "best_fixed": fixed,
        "time_to_best_of_each_bucket": [t / best for t in totals],
        "time_to_best_fixed": [t / alone[fixed] for t in totals],
        "faster_than_plain": [plain / t for t in totals],
        **world.where,
    }
    for name in ("time_to_best_of_each_bucket", "time_to_best_fixed", "faster_than_plain"):
        values = sorted(result[name])
        print(f"{name}: median {statistics.median(values):.3f}, {values[0]:.3f} to {values[-1]:.3f}")
    if arguments.json:
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
