"""Early update on and off: two training runs that take turns, step by step, and a simulation of more workers.

    python bench/early_update.py recipes/longtail.toml [--workers 2] [--steps 20] [--one-step-off] [--json FILE]
        [--section.key value]

Both runs decode the same responses and end with the same policy, except for explained forks of float32. The simulation
takes the groups, the seconds of a decoding round and the seconds of a token in the update from these runs. Its workers
decode one token per round for each row, do not help each other, and compute early shards by the rules of `rl/early.py`.

With `--one-step-off`, a third run takes turns with them, which decodes a step during the update of the step before
(`bench/one_step_off.py`). It is off-policy, so it has other responses. The simulation has the least time that such a
step can take: that of the worker that decodes longest, or that of all work spread evenly.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from forks import FILE as RESPONSES
from train import Mode, run_in_turn

from tlt import progress
from tlt.bench.rollout import ratio
from tlt.build import settled
from tlt.config import Config, load_config, parse_config
from tlt.metrics import provenance, write_json
from tlt.rl.early import PER_WORKER, in_shards, owners_of
from tlt.run.resume import as_at_its_start

SIZES = ((2, 8), (8, 32), (8, 64), (64, 256), (64, 512))
"""(workers, prompts per step) of the simulations"""
_DRAWS = 20
OFF, ON, ONE_STEP_OFF = "off", "on", "one-step-off"
_PER_ROW = 0.03  # seconds of one more row in a round, relative to those of a round with one row

Group = list[int]
"""tokens of each response"""


# -- measured ----------------------------------------------------------------------------------------------------------


def configs_of(config: Config, workers: int, steps: int, names: Sequence[str]) -> dict[str, Config]:
    found = {}
    for name in names:
        tree = config.model_dump(mode="json")
        tree["cluster"]["workers"] = workers
        tree["train"] |= {"steps": steps, "early_update": name != OFF}
        tree["run"] |= {"folder": str(Path(config.run.folder) / "bench" / f"early_{name}"), "overwrite": True}
        tree["run"] |= {"save_every": 0, "compare_every": 0}
        found[name] = parse_config(tree)
    return found


def measured(done: dict[str, Mode]) -> dict[str, Any]:
    off, on = done[OFF], done[ON]
    same = [ours == theirs for ours, theirs in zip(groups_of(off), groups_of(on), strict=True)]
    return {
        "runs": {name: facts(mode) for name, mode in done.items()},
        "faster": ratio(off.step_seconds, on.step_seconds),
        "steps_with_the_same_responses": sum(same),
        "same_sha256": off.summary["policy_sha256"] == on.summary["policy_sha256"],
        "pace": {name: pace(mode) for name, mode in done.items()},
    }


def pace(mode: Mode) -> dict[str, float]:
    """Return steps and tokens per second, without the first and the last step, which are special in one-step-off."""
    seconds = sum(mode.step_seconds[1:-1])
    tokens = sum(line["tokens"] for line in mode.lines[1:-1])
    return {"steps_per_second": (len(mode.lines) - 2) / seconds, "tokens_per_second": tokens / seconds}


def facts(mode: Mode) -> dict[str, Any]:
    return {
        "seconds": mode.seconds,
        "seconds_by_step": mode.step_seconds,
        "early_share": [line["update"]["early"] for line in mode.lines],
        "early_seconds": [line["rollout"].get("early_seconds", 0.0) for line in mode.lines],
        "update_seconds": [line["seconds"]["update"] for line in mode.lines],
        "useful_share": useful_share_of(mode),
        "policy_sha256": mode.summary["policy_sha256"],
    }


def useful_share_of(mode: Mode) -> float:
    """Return the useful share of the steps, without the time in which the other run had its turn."""
    workers = mode.summary["workers"]
    whole = sum(sum(worker["seconds"].values()) for worker in workers)
    return mode.summary["useful_share"] * whole / (len(workers) * sum(mode.step_seconds))


def groups_of(mode: Mode) -> list[list[Group]]:
    """[step][group] -> tokens of each response"""
    with (mode.folder / RESPONSES).open(encoding="utf-8") as file:
        steps = [json.loads(line) for line in file]
    return [[[len(response["token_ids"]) for response in group["responses"]] for group in step] for step in steps]


# -- simulated ---------------------------------------------------------------------------------------------------------


class Costs(NamedTuple):
    row: float
    """seconds of a round with one row"""
    token: float
    """seconds of a response token in the update"""


def costs_of(mode: Mode) -> Costs:
    """Fit both costs to the sums over a run without early update."""
    steps, workers = groups_of(mode), mode.config.cluster.workers
    tokens = sum(length for step in steps for group in step for length in group)
    rounds = sum(max(clock[-1] for clock in clocks(step, workers)) for step in steps)
    return Costs(sum(mode.rollout_seconds) / rounds, workers * mode.seconds["update"] / tokens)


def clocks(groups: Sequence[Group], workers: int) -> list[list[float]]:
    """[worker][n] -> time at which its rows have n tokens or have ended, where a round with one row takes 1."""
    found = []
    for own in (sorted(length for group in groups[worker::workers] for length in group) for worker in range(workers)):
        live = (len(own) - bisect_left(own, n) for n in range(1, own[-1] + 1 if own else 1))
        found.append([*accumulate((1 + _PER_ROW * (rows - 1) for rows in live), initial=0.0)])
    return found


def simulate(groups: Sequence[Group], workers: int, costs: Costs) -> dict[str, float]:
    """A step with early update against one without."""
    times = [[costs.row * time for time in clock] for clock in clocks(groups, workers)]
    rollout = max(time[-1] for time in times)
    order = sorted(groups, key=max)
    shards = in_shards(order, len(order), len(order), workers)
    late = order[sum(map(len, shards)) :]
    work = [costs.token * sum(map(sum, shard)) for shard in shards]
    work += [costs.token * sum(map(sum, late)) / workers] * workers
    held: list[dict[int, float]] = [{} for _ in times]
    free = [time[-1] for time in times]
    for number, shard in enumerate(shards):
        longest = max(map(max, shard))
        certain = max(time[min(longest, len(time) - 1)] for time in times)
        worker = min(range(workers), key=lambda index: (len(held[index]) >= PER_WORKER, free[index]))
        begins = max(certain, free[worker])
        share = min(1.0, (rollout - begins) / work[number])
        if share > 0 and len(held[worker]) < PER_WORKER:
            held[worker][number] = share
            free[worker] = begins + share * work[number]
    without, rest = (_longest(work, begun) for begun in ([{}] * workers, held))
    done = sum(work[number] * share for begun in held for number, share in begun.items())
    busy = sum(time[-1] for time in times) + sum(work)
    return {
        "faster": (rollout + without) / (rollout + rest),
        "update_share": without / (rollout + without),
        "hidden": 1 - rest / without,
        "early": done / sum(work),
        "useful_share": busy / (workers * (rollout + rest)),
        "useful_share_off": busy / (workers * (rollout + without)),
        "one_step_off_faster": (rollout + without) / max(rollout, busy / workers),
    }


def _longest(work: Sequence[float], held: Sequence[dict[int, float]]) -> float:
    """Seconds of the update, which ends with its last member."""
    owners = owners_of(work, held)
    left = [sum(work[k] * (1 - begun.get(k, 0.0)) for k in own) for own, begun in zip(owners, held, strict=True)]
    return max(left)


def simulated(groups: Sequence[Group], costs: Costs) -> list[dict[str, Any]]:
    """Steps of groups drawn from the measured ones."""
    chance, found = random.Random(0), []
    for workers, prompts in SIZES:
        steps = [simulate(chance.choices(groups, k=prompts), workers, costs) for _ in range(_DRAWS)]
        means = {name: statistics.fmean(step[name] for step in steps) for name in steps[0]}
        found.append({"workers": workers, "prompts": prompts, **means})
    return found


# -- both --------------------------------------------------------------------------------------------------------------


def bench(config: Config, workers: int, steps: int, names: Sequence[str], json_file: Path | None) -> None:
    """Run, simulate, print, and write the result. Raises ValueError with one sentence."""
    console, config = progress.console(), as_at_its_start(settled(config), None)
    done = run_in_turn(console, configs_of(config, workers, steps, names), {ONE_STEP_OFF: "one_step_off.py"})
    result, costs = measured(done), costs_of(done[OFF])
    low, middle, high = result["faster"]
    early = statistics.fmean(result["runs"][ON]["early_share"])
    useful = " and ".join(f"{result['runs'][name]['useful_share']:.0%}" for name in (OFF, ON))
    digests = "one sha256" if result["same_sha256"] else "two sha256"
    console.print(
        f"{workers} workers: a step {middle:.3f} ({low:.3f}-{high:.3f}) times as fast, "
        f"{early:.0%} of the update early, useful share {useful}, {digests}"
    )
    for name, found in result["pace"].items():
        console.print("{0}: {steps_per_second:.3f} steps/s, {tokens_per_second:.0f} tokens/s".format(name, **found))
    simulations = simulated([group for step in groups_of(done[OFF]) for group in step], costs)
    for row in simulations:
        console.print(
            "simulated: {workers} workers, {prompts} prompts: a step {faster:.2f} times as fast, {hidden:.0%} of the "
            "update hidden, useful share {useful_share_off:.0%} and {useful_share:.0%}; one-step-off at most "
            "{one_step_off_faster:.2f} times as fast".format(**row)
        )
    if json_file:
        setting = {"workers": workers, "steps": steps, "dtype": config.model.dtype, "model": config.model.path}
        write_json(json_file, {**setting, **result, "costs": costs._asdict(), "simulated": simulations, **provenance()})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="TOML file, such as recipes/longtail.toml")
    parser.add_argument("--workers", type=int, default=2, help="processes of each run (default 2)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default 20)")
    parser.add_argument("--one-step-off", action="store_true", help="do a run that is off-policy by one step, too")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    asked, overrides = parser.parse_known_args(argv)
    if asked.workers < 2 or asked.steps < 3:
        parser.error("--workers must be at least 2, because one worker is never idle, and --steps at least 3")
    names = [OFF, ON, *([ONE_STEP_OFF] if asked.one_step_off else [])]
    try:
        bench(load_config(asked.recipe, overrides), asked.workers, asked.steps, names, asked.json)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
