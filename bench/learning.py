"""Tests that a recipe learns, and learns from its rewards. Each seed is trained twice: as it is, and with shuffled
rewards.

    python bench/learning.py [--recipe FILE ...] [--seeds 0 1 2] [--json FILE] [--section.key value ...]

The test holds if, for every seed, held-out accuracy rises by at least 0.25, and by at most 0.05 when each step's
rewards are shuffled between its responses. A recipe without held-out prompts is judged by the mean reward of its last
steps (a tenth) against the first ones: it rises by at least 0.2, and by less with shuffled rewards, which make the
distribution sharper too.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tlt.config import Config, load_config
from tlt.metrics import provenance, read_metrics, write_json

ROOT = Path(__file__).resolve().parent.parent
RISE = 0.2
HELD_OUT_RISE, HELD_OUT_RISE_SHUFFLED = 0.25, 0.05
os.environ.setdefault("TQDM_DISABLE", "1")


class Shuffled:
    """A reward whose values are shuffled within a step: the mean is the same, and there is nothing to learn."""

    def __init__(self, reward: Any, seed: int) -> None:
        self.reward, self.random = reward, random.Random(seed)

    def submit(self, response: Any) -> None:
        self.reward.submit(response)

    def close(self) -> None:
        self.reward.close()

    def __call__(self, responses: Sequence[Any]) -> None:
        self.reward(responses)
        results = [(response.reward, response.outcome) for response in responses]
        self.random.shuffle(results)
        for response, result in zip(responses, results, strict=True):
            response.reward, response.outcome = result


def run(recipe: str, config: Config, shuffled: bool) -> dict[str, Any]:
    from rich.console import Console

    from tlt.run import opening
    from tlt.run.display import Display
    from tlt.run.train import train

    make_reward = opening.make_reward

    def reward(config: Config, prompts: Sequence[Any], *more: Any) -> Any:
        made = make_reward(config, prompts, *more)
        return Shuffled(made, config.run.seed) if shuffled else made

    with patch.object(opening, "make_reward", reward):
        summary = train(config, False, Display(Console(file=sys.stderr)))
    mean = f"mean@{config.eval.samples}"
    first, last = summary["eval_first"].get(mean), summary["eval_last"].get(mean)
    lines = read_metrics(Path(config.run.folder))
    held_out = {line["step"] - 1: line["eval"][mean] for line in lines if line["eval"]}
    rise = summary["reward_last"] - summary["reward_first"]
    return {
        "recipe": recipe,
        "seed": config.run.seed,
        "shuffled": shuffled,
        "reward_first": summary["reward_first"],
        "reward_last": summary["reward_last"],
        "rise": rise,
        "rewards": [line["reward"] for line in lines],
        "held_out": held_out if last is None else {**held_out, config.train.steps: last},
        "held_out_first": first,
        "held_out_last": last,
        "holds": holds(shuffled, rise, None if last is None else last - first),
        "seconds": summary["seconds"]["total"],
        "policy_sha256": summary["policy_sha256"],
    }


def holds(shuffled: bool, rise: float, held_out: float | None) -> bool:
    """Return whether a run learned as it should from its rewards, given the rise of both."""
    if held_out is None:
        return rise < RISE if shuffled else rise >= RISE
    return held_out <= HELD_OUT_RISE_SHUFFLED if shuffled else held_out >= HELD_OUT_RISE


def runs_of(recipe: Path, seeds: Sequence[int], overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the result of each run of a recipe."""
    for seed in seeds:
        for shuffled in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                config = load_config(recipe, [*overrides, "--run.seed", str(seed), "--run.folder", folder])
                if config.data.tasks or config.eval.path:  # before the first step, and at the end
                    held_out = config.eval.model_copy(update={"every": config.eval.every or config.train.steps})
                    config = config.model_copy(update={"eval": held_out})
                yield run(recipe.name, config, shuffled)


def shown(row: dict[str, Any]) -> str:
    first, last = row["held_out_first"], row["held_out_last"]
    held_out = "" if first is None else f", held out {first:.3f} to {last:.3f}"
    return (
        f"{row['recipe']}, seed {row['seed']}{', rewards shuffled' if row['shuffled'] else ''}: reward "
        f"{row['reward_first']:.3f} to {row['reward_last']:.3f}{held_out}: "
        f"{'holds' if row['holds'] else 'DOES NOT HOLD'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, nargs="+", default=[ROOT / "recipes" / "quickstart.toml"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    rows = []
    for recipe in arguments.recipe:
        for row in runs_of(recipe, arguments.seeds, overrides):
            rows.append(row)
            print(shown(row), flush=True)
            if arguments.json:
                write_json(arguments.json, {"overrides": overrides, "runs": rows, **provenance()})
    sys.exit(0 if all(row["holds"] for row in rows) else 1)


if __name__ == "__main__":
    main()
