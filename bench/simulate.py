"""Simulates a run with many workers: the project's own driver, with simulated workers in simulated time.

    python bench/simulate.py recipes/longtail.toml --runs FOLDER [--steps 20] [--json FILE]
    python bench/simulate.py recipes/longtail.toml --runs FOLDER --rounds FILE --shape 7b

The runs of the first call stay in FOLDER and are not repeated. They take five minutes on a quiet machine.

Coordinator, allocation, order of idle work, look-ahead and schedule of drafter training are those of `tlt train`.
Only the workers are simulated (`simulated.py`). Their rounds and updates take what runs with one worker took on this
machine. Responses have the lengths, accept lengths and rewards of these runs (`simulated_profiles.py`). The calibration
compares simulated runs of one, two and three workers with measured ones. Then 8 and 64 workers are simulated, each with
cores of its own and 16 responses a step: with lengths and speeds of the toy, with those of the TLT paper, and with
rounds of bench/gpu_rounds.py (`--rounds`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from profile_run import SKIPPED
from simulated import Known, Learner, Profile, SimulatedWorker
from simulated_pool import Clock, SimulatedPool
from simulated_profiles import (
    KnownGroup,
    gpu_profile,
    mean_seconds,
    measured_profile,
    paper_lengths,
    paper_profile,
    recorded_lengths,
    resampled,
    run_all,
)

from tlt.build import for_machine
from tlt.cluster.coordinator import Coordinator
from tlt.cluster.drafter_training import DrafterTraining
from tlt.cluster.remote import ClusterPolicy, ClusterRollout
from tlt.cluster.supervisor import Supervisor
from tlt.config import Config, load_config, parse_config
from tlt.metrics import provenance, useful_share, write_json
from tlt.rl.groups import make_batch
from tlt.trace import seconds_by_state
from tlt.types import Group, Prompt, Request, SamplingParams

MEASURED = (1, 2, 3)
"""numbers of workers of the calibration"""
PHASES = ("rollout", "reward", "update", "sync", "other")
PER_WORKER = 16
"""responses per step and worker in the simulations of many workers"""
STEPS = 6
_PAPER_ROLLOUT = 0.85  # share of a step that the paper's rollouts take with plain decoding
_NO_TOKENS = SamplingParams(max_new_tokens=1 << 20)


class Case(NamedTuple):
    """Ways to use idle time."""

    drafts: bool = True
    ahead: bool = False
    training: bool = False


CASES = {
    "plain": Case(drafts=False),
    "adaptive": Case(),
    "look-ahead": Case(ahead=True),
    "training": Case(training=True),
    "all": Case(ahead=True, training=True),
}


class Simulation:
    """Run whose workers are simulated. `steps`: groups of each step."""

    def __init__(self, config: Config, profile: Profile, steps: Sequence[Sequence[KnownGroup]], case: Case) -> None:
        tree = config.model_dump(mode="json")
        if not case.drafts:
            tree["speculation"] |= {"drafter": "off", "path": None}
        if not case.ahead:
            tree["speculation"]["look_ahead"] = 0
        self.config, self.profile, self.case = parse_config(tree), profile, case
        self.clock, self.known = Clock(), dict[int, Known]()
        self.requests = [self._requests(number, groups) for number, groups in enumerate(steps)]
        learner = Learner(profile.training if case.training else None)
        parts = (self.config, profile, self.known, self.clock, learner)
        workers = [SimulatedWorker(*parts) for _ in range(config.cluster.workers)]
        pool = SimulatedPool(workers, self.clock, profile.call, profile.speed)
        with self.clock.installed():
            supervisor = Supervisor(pool)
            training = DrafterTraining(supervisor, self.config, cast(Any, None), None)
            training.is_on = learner.training is not None
            training.schedule.rests = profile.training is not None and not profile.training.gain
            training.saver = cast(Any, SimpleNamespace(save=lambda *_: None, wait=lambda: None))
            coordinator = Coordinator(supervisor, self.config, training=training)
        self.rollout, self.policy = ClusterRollout(coordinator), ClusterPolicy(supervisor)

    def _requests(self, step: int, groups: Sequence[KnownGroup]) -> list[Request]:
        found: list[Request] = []
        for place, group in enumerate(groups):
            number = step * len(groups) + place
            prompt = Prompt(number, "", (number,) * group.prompt)
            for index, known in enumerate(group.responses):
                seed = len(self.known)
                self.known[seed] = known
                found.append(Request(prompt, index, 0, seed, _NO_TOKENS))
        return found

    def run(self, count: int) -> dict[str, Any]:
        """Run `count` steps. Return the means over those after the first ones."""
        with self.clock.installed():
            steps = [self._step(number) for number in range(count)][SKIPPED:]
        spent = [workers for _, workers, _ in steps]
        return {
            **{name: statistics.fmean(seconds[name] for seconds, _, _ in steps) for name in steps[0][0]},
            "useful_share": useful_share((workers, counts) for _, workers, counts in steps),
            "seen_ahead": sum(c["seen_ahead"] for *_, c in steps) / sum(c["tokens"] for *_, c in steps),
            "states": {
                state: sum(worker[state] for step in spent for worker in step)
                / sum(sum(worker.values()) for step in spent for worker in step)
                for state in spent[0][0]
            },
        }

    def _step(self, step: int) -> tuple[dict[str, float], list[dict[str, float]], dict[str, Any]]:
        """Simulate one step. Return its seconds by phase, each worker's seconds by state, and counters."""
        requests, began = self.requests[step], self.clock.now
        responses, stats = self.rollout.generate(requests, lambda response: None, self.requests[step + 1 :])
        decoded = self.clock.now
        self.clock.now += self.profile.other
        self.rollout.release()
        by_seed = {response.request.seed: response for response in responses}
        size = self.config.rollout.group_size
        ordered = [by_seed[request.seed] for request in requests]
        groups = [Group(ordered[at].request.prompt, ordered[at : at + size]) for at in range(0, len(ordered), size)]
        self.policy.update(make_batch(groups, self.config), step)
        updated = self.clock.now
        self.rollout.sync(self.policy, step + 1)
        spans = self.rollout.trace()
        seconds = {"step": self.clock.now - began, "rollout": decoded - began, "update": updated - decoded}
        return seconds, [seconds_by_state(worker) for worker in spans], vars(stats)


# -- calibration -------------------------------------------------------------------------------------------------------


def calibrate(config: Config, runs: Path) -> tuple[Profile, list[dict[str, Any]]]:
    """Compare simulated runs with measured ones. Return the profile and the comparison. The seconds in which several
    workers copy their state and sum gradients are fitted to the measured updates with two workers."""
    profile, rows = measured_profile(runs, MEASURED), list[dict[str, Any]]()
    steps = recorded_lengths(runs / "workers_1")
    for workers in MEASURED:
        own = for_machine(with_workers(config, workers))
        case = Case(drafts=True, ahead=own.speculation.look_ahead > 0, training=workers > 1)
        folder = runs / f"workers_{workers}"
        found = Simulation(own, profile, steps, case).run(len(steps))
        if workers == 2:
            more = mean_seconds(folder, "update") - found["update"]
            profile = replace(profile, group=max(0.0, more * profile.speed(workers)))
            found = Simulation(own, profile, steps, case).run(len(steps))
        measured = {phase: mean_seconds(folder, phase) for phase in ("rollout", "update")}
        measured["step"] = mean_seconds(folder, *PHASES)
        error = found["step"] / measured["step"] - 1
        rows.append({"workers": workers, "measured": measured, "simulated": found, "error": error})
        print(f"{workers} workers: a step {measured['step']:.3f} s, simulated {found['step']:.3f} s ({error:+.1%})")
    return profile, rows


def with_workers(config: Config, workers: int, prompts: int | None = None, slice_seconds: float = 0.2) -> Config:
    tree = config.model_dump(mode="json")
    tree["cluster"] |= {"workers": workers, "slice_seconds": slice_seconds}
    tree["rollout"]["prompts_per_step"] = prompts or config.rollout.prompts_per_step
    return parse_config(tree)


# -- many workers ------------------------------------------------------------------------------------------------------

Lengths = Callable[[int, int], Sequence[Sequence[KnownGroup]]]
"""function from the numbers of prompts of a step and of steps to the groups of each step"""


def many(name: str, config: Config, profile: Profile, lengths: Lengths, slice_seconds: float) -> list[dict[str, Any]]:
    """Simulate 8 and 64 workers in all cases, and print a table row for each."""
    rows: list[dict[str, Any]] = []
    for workers in (8, 64):
        prompts = workers * PER_WORKER // config.rollout.group_size
        own = with_workers(config, workers, prompts, slice_seconds)
        steps = lengths(prompts, STEPS + config.speculation.look_ahead)  # those of the end are only decoded ahead
        if not profile.update:
            profile = replace(profile, update=_update_of_paper(own, profile, steps))
        found = {case: Simulation(own, profile, steps, how).run(STEPS) for case, how in CASES.items()}
        for case, result in found.items():
            plain, adaptive = (found[other]["step"] / result["step"] for other in ("plain", "adaptive"))
            rows.append({"world": name, "workers": workers, "case": case, "times_plain": plain, **result})
            print(
                f"{name}, {workers} workers, {case}: a step {result['step']:.2f} s, {plain:.2f} times plain, "
                f"{adaptive:.3f} times adaptive, useful {result['useful_share']:.0%}, seen ahead "
                f"{result['seen_ahead']:.0%}",
                flush=True,
            )
    return rows


def _update_of_paper(config: Config, profile: Profile, steps: Sequence[Sequence[KnownGroup]]) -> float:
    """Return the seconds per token with which an update takes 15 % of a step with plain decoding."""
    free = Simulation(config, profile, steps, CASES["plain"]).run(SKIPPED + 2)
    one = Simulation(config, replace(profile, update=1e-6), steps, CASES["plain"]).run(SKIPPED + 2)
    return 1e-6 * free["rollout"] * (1 / _PAPER_ROLLOUT - 1) / (one["update"] - free["update"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="TOML file, such as recipes/longtail.toml")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the measured runs")
    parser.add_argument("--steps", type=int, default=20, help="steps of each measured run")
    parser.add_argument("--rounds", type=Path, help="JSON of bench/gpu_rounds.py")
    parser.add_argument("--shape", default="7b", help="model of --rounds")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    asked = parser.parse_args()
    config = load_config(asked.recipe)
    if not (asked.runs / f"workers_{MEASURED[-1]}" / "summary.json").is_file():
        run_all(config, asked.runs, asked.steps, MEASURED)
    profile, calibration = calibrate(config, asked.runs)
    apart = replace(profile, speeds=(1.0,))
    recorded = recorded_lengths(asked.runs / "workers_1")
    size = config.rollout.group_size
    rows = many("toy", config, apart, lambda prompts, count: resampled(recorded, prompts, count), 0.2)
    rows += many("paper", config, paper_profile(0.0), lambda prompts, count: paper_lengths(prompts, count, size), 10.0)
    if asked.rounds:
        gpu = gpu_profile(asked.rounds, asked.shape)
        rows += many(asked.shape, config, gpu, lambda prompts, count: paper_lengths(prompts, count, size), 10.0)
    if asked.json:
        tree = {"calibration": calibration, "profile": asdict(profile), "many": rows}
        write_json(asked.json, tree | provenance())
    return 0


if __name__ == "__main__":
    sys.exit(main())
