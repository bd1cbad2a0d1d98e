"""Tests whether spot training adapts the drafter when the task changes, where a sharper policy alone cannot help.

    python bench/task_shift.py --json FILE [--steps 200] [--seeds 2] [--modes suffix,frozen,bound,spot,adaptive]

recipes/longtail.toml is run as a curriculum of two stages: sums and greatest common divisors, then, from the middle of
the run on, prime factors and counts of bits. The drafter was trained on the first stage alone (it is made here, once,
if --drafter names no folder). The modes are those of bench/train.py, which take turns step by step, and `bound`: the
mode `frozen` with assets/tiny-drafter, which was trained on all four tasks; it shows the most that adapting can give.
In the result `adaptive` is spot training without look-ahead (the mode `spot`), and `adaptive+ahead` is spot training
with look-ahead (the mode `adaptive`).

{"phases": [{"name", "first", "last", "ratios": {"adaptive/frozen": [low, median, high], ...}, "steps": {...},
             "seconds": {mode: of all rollouts in sum}}],
 "recovered", "policy_sha256"}: `ratios` are of rollout speed, the median of paired steps of all seeds with its 95 %
interval; `steps` are the same for whole steps. `recovered` is the fraction of the way from `frozen` to `bound` that is
gone in the last phase.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rollout import ratio
from train import Mode, mode_config, run_in_turn

from tlt.commands.draft import train_drafter
from tlt.config import Config, load_config, parse_config
from tlt.metrics import provenance, write_json

RECIPE = "recipes/longtail.toml"
LATER = ("prime_factorization", "count_bits")
MODES = ("suffix", "frozen", "bound", "spot", "adaptive")
NAMES = {"spot": "adaptive", "adaptive": "adaptive+ahead"}
COMPARED = (("adaptive", "frozen"), ("adaptive", "suffix"), ("bound", "frozen"))
SETTLING = 0.25  # fraction of the steps after the shift that is a phase of its own
HARVEST, SECONDS = 80_000, 300.0  # entries and seconds of training of the first stage's drafter


def shifting(config: Config, steps: int, seed: int) -> Config:
    """The recipe with as many prompts as the steps take, the first half of them of the first stage."""
    tree = config.model_dump(mode="json")
    for task in tree["data"]["tasks"]:
        task["stage"] = int(task["name"] in LATER)
    tree["data"]["size"] = steps * config.rollout.prompts_per_step
    tree["run"]["seed"] = seed
    tree["train"]["steps"] = steps
    return parse_config(tree)


def first_stage(config: Config) -> Config:
    tree = config.model_dump(mode="json")
    tree["data"]["tasks"] = [task for task in tree["data"]["tasks"] if task["name"] not in LATER]
    tree["speculation"]["path"] = None
    tree["speculation"]["training"]["micro_batch_tokens"] = 512  # as for assets/tiny-drafter
    return parse_config(tree)


def race(config: Config, bound: str, steps: int, modes: Sequence[str], console: Console) -> dict[str, Mode]:
    """Run all modes with one seed, in turn, step by step."""
    best = config.model_copy(update={"speculation": config.speculation.model_copy(update={"path": bound})})
    configs = {
        name: mode_config(best if name == "bound" else config, "frozen" if name == "bound" else name, 2, steps, 0, name)
        for name in modes
    }
    return {NAMES.get(name, name): mode for name, mode in run_in_turn(console, configs).items()}


def phases_of(steps: int) -> dict[str, tuple[int, int]]:
    shift = steps // 2
    settled = shift + max(1, round(SETTLING * (steps - shift)))
    return {
        "before the shift": (0, shift - 1),
        "the shift": (shift, settled - 1),
        "after the shift": (settled, steps - 1),
    }


def compared(done: Sequence[Mapping[str, Mode]], first: int, last: int, whole: bool) -> dict[str, Any]:
    """Ratios of the speed of one mode to another's, over these steps of all seeds."""

    def seconds(name: str) -> list[float]:
        runs = [modes[name].step_seconds if whole else modes[name].rollout_seconds for modes in done]
        return list(itertools.chain.from_iterable(run[first : last + 1] for run in runs))

    known = set(done[0])
    ahead = [(f"{ours}+ahead", theirs) for ours, theirs in COMPARED if ours == "adaptive"]
    pairs = [pair for pair in (*COMPARED, *ahead) if set(pair) <= known]
    return {f"{ours}/{theirs}": ratio(seconds(theirs), seconds(ours)) for ours, theirs in pairs}


def recovered(ratios: Mapping[str, Sequence[float]], name: str = "adaptive") -> float | None:
    """The fraction of the way from `frozen` to `bound` that a mode has gone, by medians; None if there is no way."""
    there, bound = ratios.get(f"{name}/frozen"), ratios.get("bound/frozen")
    if there is None or bound is None or bound[1] <= 1.0:
        return None
    return (there[1] - 1) / (bound[1] - 1)


def result_of(done: Sequence[Mapping[str, Mode]], steps: int) -> dict[str, Any]:
    phases = [
        {
            "name": name,
            "first": first,
            "last": last,
            "ratios": compared(done, first, last, whole=False),
            "steps": compared(done, first, last, whole=True),
            "seconds": {
                mode: sum(sum(modes[mode].rollout_seconds[first : last + 1]) for modes in done) for mode in done[0]
            },
            "accept_length": {
                mode: statistics.fmean(
                    line["accept_length"] for modes in done for line in modes[mode].lines[first : last + 1]
                )
                for mode in done[0]
            },
        }
        for name, (first, last) in phases_of(steps).items()
    ]
    digests = [sorted({mode.summary["policy_sha256"] for mode in modes.values()}) for modes in done]
    return {
        "phases": phases,
        "recovered": recovered(phases[-1]["ratios"]),
        "recovered_ahead": recovered(phases[-1]["ratios"], "adaptive+ahead"),
        "policy_sha256": ["all modes differ" if len(found) > 1 else found[0] for found in digests],
        "sha256_by_seed": digests,
        "runs": [{name: _by_step(mode) for name, mode in modes.items()} for modes in done],
    }


def _by_step(mode: Mode) -> dict[str, Any]:
    return {
        "rollout_seconds": mode.rollout_seconds,
        "step_seconds": mode.step_seconds,
        "accept_length": [line["accept_length"] for line in mode.lines],
        "drafter_version": [line["rollout"]["spot"].get("version", 0) for line in mode.lines],
        "drafter_tokens": [line["rollout"]["drafter_tokens"] for line in mode.lines],
        "spot_seconds": [sum(worker["SPOT"] for worker in line["workers"]) for line in mode.lines],
    }


def show(found: Mapping[str, Any]) -> Iterable[str]:
    for phase in found["phases"]:
        yield f"{phase['name']}, steps {phase['first']} to {phase['last']}"
        for what in ("ratios", "steps"):
            for pair, (low, middle, high) in phase[what].items():
                yield f"  {'rollout' if what == 'ratios' else 'step':8s} {pair:26s} {middle:.3f} ({low:.3f}-{high:.3f})"
        yield "  rollouts, seconds " + ", ".join(f"{name} {value:.1f}" for name, value in phase["seconds"].items())
        yield "  accept length " + ", ".join(f"{name} {value:.2f}" for name, value in phase["accept_length"].items())
    yield f"recovered {found['recovered']}, with look-ahead {found['recovered_ahead']}"
    yield f"policies {found['policy_sha256']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--drafter", type=Path, help="of the first stage; left out, it is made in the run's folder")
    parser.add_argument("--bound", default="assets/tiny-drafter", help="a drafter that knows both stages")
    parser.add_argument("--folder", type=Path, default=Path("runs/task_shift"))
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    console, config = Console(highlight=False), load_config(RECIPE, overrides)
    drafter = arguments.drafter or arguments.folder / "drafter"
    if not drafter.exists():
        train_drafter(first_stage(config), drafter, HARVEST, SECONDS)
    own = ["--speculation.path", str(drafter.resolve()), "--speculation.drafter", "adaptive"]
    config = load_config(RECIPE, [*overrides, *own, "--run.folder", str(arguments.folder)])
    bound, modes = str(Path(arguments.bound).resolve()), arguments.modes.split(",")
    done = []
    for seed in range(arguments.seeds):
        console.rule(f"seed {seed}")
        this = shifting(config, arguments.steps, seed)
        this = this.model_copy(
            update={"run": this.run.model_copy(update={"folder": f"{arguments.folder}/seed_{seed}"})}
        )
        done.append(race(this, bound, arguments.steps, modes, console))
        found = result_of(done, arguments.steps)
        console.print("\n".join(show(found)), soft_wrap=True)
        if arguments.json:
            write_json(arguments.json, {**found, "seeds": seed + 1, "drafter": str(drafter), **provenance()})


if __name__ == "__main__":
    main()
