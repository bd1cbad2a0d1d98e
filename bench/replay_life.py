"""Replays the drafter's life on the harvest of a recorded run: what the drafter learns is real, seconds are made up.

    python bench/replay_life.py recipes/longtail.toml --harvest FILE [--steps 200] [--shift] [--drafter DIR | --cold]
        [--idle 0.2] [--change slope=1.0 ...] [--json FILE]

The run is done once, by one worker, if FILE does not exist; its harvest takes some 1.5 MB a step. With --shift it is
that of bench/task_shift.py. Then the state machine, the gate and two trainers live through it as two workers would,
with seconds of rounds as measured at batch 1 (`COSTS`): a rollout takes as long as its longest response, `--idle` of
the workers' time in it is idle, and one worker at a time. So a rule for training is tried in minutes, on the same
harvest, whatever else the machine does. `--change` sets thresholds of the gate.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from task_shift import shifting
from torch import Tensor

from tlt.build import open_workplace
from tlt.config import Config, load_config, parse_config
from tlt.draft.average import average
from tlt.draft.buffer import Harvest
from tlt.draft.eagle import EagleLayer, eagle_options, load_drafter
from tlt.draft.gate import Judgement, Thresholds, TrainingGate
from tlt.draft.horizon import Horizon, RoundCosts, agreement_of, mean_speed, speeds, weights
from tlt.draft.lifecycle import Action, Adopt, Collect, Combine, Forget, Judge, Lifecycle, Publish
from tlt.draft.spot import SpotTrainer
from tlt.draft.unroll import bundles, pack
from tlt.metrics import provenance, write_json
from tlt.models.decoder import Decoder
from tlt.run import train

PLAIN = 1.74e-3  # seconds of a plain round at batch 1
COSTS = [RoundCosts(1.0, PLAIN, {d: PLAIN + 0.61e-3 + 0.29e-3 * d for d in (2, 4, 8, 16)}, fallback=1.05)]
LONGER = 2.4  # a rollout takes so many times longer than its longest response at batch 1
PACE, BESIDE = 0.03, 0.1  # seconds of a micro-batch, and what one of them costs those who decode
SLICE = 0.2  # seconds for which workers catch up before it is decided anew


@dataclass
class Recorded:
    """The harvest of each target version, with that version's head and embedding."""

    items: dict[int, list[Harvest]]
    heads: dict[int, Tensor]
    embeddings: dict[int, Tensor]


@dataclass
class RecordedTarget:
    """The target as it was at a version (`tlt.draft.teacher.Teacher`)."""

    recorded: Recorded
    decoder: Decoder
    version: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    @property
    def head(self) -> Tensor:
        return self.recorded.heads[self.version]

    @property
    def embedding(self) -> Tensor:
        return self.recorded.embeddings[self.version]


def record(config: Config) -> Recorded:
    """Do the run with a trainer that never trains, and keep what it is given."""
    recorded = Recorded({}, {}, {})

    def moved(spot: SpotTrainer) -> None:
        version = spot.target.version
        recorded.heads[version], recorded.embeddings[version] = spot.target.head.clone(), spot.target.embedding.clone()

    def harvested(spot: SpotTrainer, item: Harvest) -> None:
        if item.target_version not in recorded.heads:
            moved(spot)
        recorded.items.setdefault(item.target_version, []).append(item)

    with (
        patch.object(SpotTrainer, "harvest", harvested),
        patch.object(SpotTrainer, "target_moved", moved),
        patch.object(SpotTrainer, "ready", PropertyMock(return_value=False)),
        patch.object(SpotTrainer, "judge", lambda *arguments, **named: Judgement()),
    ):
        train(config)
    return recorded


class Replay:
    """Two workers, of which one at a time is idle."""

    def __init__(self, config: Config, recorded: Recorded, decoder: Decoder, layer: EagleLayer, gate: Thresholds):
        self.recorded, self.training = recorded, config.speculation.training
        self.targets: list[Any] = [RecordedTarget(recorded, decoder, min(recorded.items)) for _ in range(3)]
        *self.workers, self.judge = [SpotTrainer(layer, t, self.training, i) for i, t in enumerate(self.targets)]
        self.frozen = self.in_use = layer
        self.life = Lifecycle(
            TrainingGate(self.training.unroll, layer.trained, gate), 2, self.training.micro_batch_tokens
        )
        self.micro_batches, self.spent = 0, 0.0  # worker seconds, of the present step

    def accept_length(self, layer: EagleLayer, version: int) -> float:
        """Of chains of `unroll` guesses, on all that this version answered."""
        parts = bundles(self.recorded.items[version], 512)
        sums = [self.judge.trainer.judge([layer], pack(part, self.judge.target.device)) for part in parts]
        return sum(entries for _, entries in sums) / sum(rounds for [(rounds, _)], _ in sums)

    def speed(self, accept_length: float) -> float:
        agreement = agreement_of(accept_length, self.training.unroll)
        return mean_speed(speeds(agreement, COSTS, self.training.unroll), weights(COSTS))

    def step(self, number: int, version: int, left: int, idle: float) -> dict[str, Any]:
        for target, spot in zip(self.targets, [*self.workers, self.judge], strict=True):
            target.version = version
            spot.target_moved()
        self.life.rollout_begins(version)
        ours, theirs = (self.accept_length(layer, version) for layer in (self.in_use, self.frozen))
        longest = max(item.end - item.prompt_length for item in self.recorded.items[version])
        seconds, frozen = (LONGER * PLAIN * longest / self.speed(length) for length in (ours, theirs))
        self.spend(2 * idle * seconds, [number % 2])
        seconds += BESIDE * self.spent
        for item in self.recorded.items[version]:
            self.workers[item.prompt_id % 2].harvest(item)
        entries = sum(len(item.tokens) for item in self.recorded.items[version])
        horizon = Horizon(left, seconds, 2 * idle * seconds, BESIDE, 2, entries, self.speed(ours))
        self.life.rollout_ends(horizon, COSTS)
        for spot in self.workers:
            spot.rollout_ended()
        held_up, self.spent = 0.0, 1.0
        while self.spent and held_up < self.life.gate.catch_up(self.training.catch_up):
            self.spend(2 * SLICE, [0, 1])
            held_up += self.spent / 2
        self.life.held_up(held_up)
        for action in self.life.update_begins():
            self.do(action)
        row = {"frozen": theirs, "adaptive": ours, "frozen_seconds": frozen, "seconds": seconds, "held_up": held_up}
        return {"step": number, **row, "micro_batches": self.micro_batches, "version": self.life.version}

    def spend(self, seconds: float, idle: Sequence[int]) -> None:
        """Let these workers do what is due and train, for so many worker seconds in sum."""
        self.spent, trained = 0.0, True
        while self.spent < seconds and trained:
            while actions := self.life.idle([0, 1]):
                for action in actions:
                    self.do(action)
            trained = sum(self.train(worker) for worker in idle if self.life.gate.should_train()) > 0

    def train(self, worker: int) -> bool:
        for action in self.life.about_to_train(worker):
            self.do(action)
        report = self.workers[worker].train(0.0)
        took = PACE * report.micro_batches
        self.life.trained(worker, report._replace(seconds=took))
        self.micro_batches += report.micro_batches
        self.spent += took
        return report.micro_batches > 0

    def do(self, action: Action) -> None:
        match action:
            case Collect(workers):
                for worker in workers:
                    self.life.answered(worker, self.workers[worker].replica())
            case Combine(replicas, start):
                self.life.combined(average(replicas, start))
            case Judge(workers, candidate):
                for worker in workers:
                    judged = self.workers[worker].judge(candidate.tensors if candidate else None)
                    passes = judged.entries / self.training.micro_batch_tokens * (1 + (candidate is not None))
                    self.spent += 0.5 * PACE * passes
                    self.life.answered(worker, judged._replace(seconds=0.5 * PACE * passes))
            case Publish(_, candidate, agreement):
                for spot in self.workers:
                    self.in_use = spot.publish(candidate.tensors, agreement)
            case Adopt(worker, start):
                self.workers[worker].adopt(start)
            case Forget(workers):
                for worker in workers:
                    self.workers[worker].forget()
            case _:
                raise AssertionError(action)


def shown(rows: Sequence[dict[str, Any]], by: int = 20) -> Iterator[str]:
    for part in [rows[first : first + by] for first in range(0, len(rows), by)] + [rows]:
        frozen, ours = (statistics.harmonic_mean(row[name] for row in part) for name in ("frozen", "adaptive"))
        held_up, without = (sum(row[name] for row in part) for name in ("held_up", "frozen_seconds"))
        seconds = held_up + sum(row["seconds"] for row in part)
        yield (
            f"steps {part[0]['step']:3d} to {part[-1]['step']:3d}: accept length {ours:.2f}, frozen {frozen:.2f}; "
            f"{part[-1]['micro_batches']} micro-batches; {seconds:.1f} s, of which held up {held_up:.1f}; "
            f"{without / seconds:.2f} times as fast as frozen"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--harvest", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shift", action="store_true")
    parser.add_argument("--drafter", default="assets/tiny-drafter")
    parser.add_argument("--cold", action="store_true", help="begin with a random drafter")
    parser.add_argument("--idle", type=float, default=0.2)
    parser.add_argument("--change", nargs="*", default=[], help="name=value of the gate's thresholds")
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    config = load_config(arguments.recipe, ["--speculation.path", arguments.drafter, *overrides])
    if arguments.shift:
        config = shifting(config, arguments.steps, config.run.seed)
    if not arguments.harvest.exists():
        tree = config.model_dump(mode="json")
        tree["train"]["steps"], tree["cluster"]["workers"] = arguments.steps, 1
        tree["speculation"]["training"]["budget"] = 1e-3  # so that there is a trainer
        torch.save(record(parse_config(tree)), arguments.harvest)
    recorded = torch.load(arguments.harvest, weights_only=False)
    _, _, decoder, _ = open_workplace(config)
    if arguments.cold:
        torch.manual_seed(config.run.seed)
        layer = EagleLayer(eagle_options(decoder.options, config.speculation.kind, config.speculation.window))
    else:
        layer = load_drafter(arguments.drafter, decoder.options)
    changes = {name: float(value) for name, value in (change.split("=") for change in arguments.change)}
    replayed = Replay(config, recorded, decoder, layer, replace(Thresholds(), **changes))
    versions = sorted(recorded.items)[: arguments.steps]
    rows = []
    for number, version in enumerate(versions):
        rows.append(replayed.step(number, version, len(versions) - number - 1, arguments.idle))
        if number % 20 == 19:
            print(next(shown(rows[-20:])), flush=True)
    print(list(shown(rows))[-1])
    if arguments.json:
        write_json(arguments.json, {"shown": list(shown(rows)), "steps": rows, "changes": changes, **provenance()})


if __name__ == "__main__":
    main()
