"""Compares ways for two workers to train one drafter in turn, on a harvest that was recorded.

    python bench/turns.py recipes/longtail.toml --harvest FILE --drafter DIR [--steps 60] [--json FILE]

FILE is written by `bench/replay_life.py --shift`, and DIR holds the first stage's drafter (`bench/task_shift.py`).
After the shift one worker trains in each step, for `--micro_batches` of them (8):

    alone     one trainer, which has the whole harvest
    averaged  two in turn, each with the responses to every other prompt; their replicas are averaged every 16
    handed    the same, but each goes on from where the other stopped

The accept length is of chains of `unroll` guesses, on the responses of the step to come.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from replay_life import Recorded, RecordedTarget
from task_shift import shifting

from tlt.build import open_workplace
from tlt.config import Config, load_config
from tlt.draft.average import Replica, average
from tlt.draft.eagle import EagleLayer, load_drafter
from tlt.draft.gate import THRESHOLDS
from tlt.draft.spot import SpotTrainer
from tlt.draft.unroll import bundles, pack
from tlt.metrics import provenance, write_json
from tlt.models.decoder import Decoder

WAYS = ("alone", "averaged", "handed")


def accept_lengths(
    way: str, config: Config, recorded: Recorded, decoder: Decoder, layer: EagleLayer, first: int, each: int
) -> Iterator[tuple[int, float]]:
    """(entries, expected rounds) of each step from the version `first` on."""
    training = config.speculation.training
    targets: list[Any] = [RecordedTarget(recorded, decoder, first) for _ in range(1 if way == "alone" else 2)]
    spots = [SpotTrainer(layer, target, training, number) for number, target in enumerate(targets)]
    turn, since, start = 0, 0, None  # whose turn it was, micro-batches since the replicas were averaged, and from where
    for step, version in enumerate(sorted(v for v in recorded.items if v >= first)):
        for target, spot in zip(targets, spots, strict=True):
            target.version = version
            spot.target_moved()
        spot = spots[turn]
        candidate = spot.publish({f"mean.{n}": t for n, t in zip(spot.names, spot.mean, strict=True)}, layer.agreement)
        parts = [pack(part, spot.target.device) for part in bundles(recorded.items[version], 512)]
        judged = [spot.trainer.judge([candidate], part) for part in parts]
        yield sum(entries for _, entries in judged), sum(rounds for [(rounds, _)], _ in judged)
        for item in recorded.items[version]:
            spots[item.prompt_id % len(spots)].harvest(item)
        for one in spots:
            one.rollout_ended()
        before, turn = turn, step % len(spots)
        if way == "handed" and turn != before:
            spots[turn].adopt(_replica(spots[before]))
        for _ in range(each):
            since += spots[turn].train(0.0).micro_batches
            if way == "averaged" and since >= THRESHOLDS.stretch:
                start, since = average([_replica(one) for one in spots], start), 0
                for one in spots:
                    one.adopt(start)


def _replica(spot: SpotTrainer) -> Replica:
    found = spot.replica()
    assert found, "it is finite"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--harvest", type=Path, required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    config = load_config(arguments.recipe, ["--speculation.path", arguments.drafter, *overrides])
    recorded = torch.load(arguments.harvest, weights_only=False)
    shift = (max(recorded.items) + 1) // 2
    config = shifting(config, 2 * shift, config.run.seed)
    _, _, decoder, _ = open_workplace(config)
    layer, found = load_drafter(arguments.drafter, decoder.options), dict[str, list[float]]()
    for way in WAYS:
        steps = accept_lengths(way, config, recorded, decoder, layer, shift, arguments.micro_batches)
        done = [one for one, _ in zip(steps, range(arguments.steps), strict=False)]
        tens = [done[at : at + 10] for at in range(0, len(done), 10)]
        found[way] = [sum(entries for entries, _ in ten) / sum(rounds for _, rounds in ten) for ten in tens]
        print(
            f"{way}: accept length in each ten steps " + " ".join(f"{length:.2f}" for length in found[way]), flush=True
        )
    if arguments.json:
        write_json(arguments.json, {"micro_batches": arguments.micro_batches, "accept_length": found, **provenance()})


if __name__ == "__main__":
    main()
