"""How a random drafter comes into use in a run with spot training, step by step.

    tlt train recipes/longtail.toml --workers 2 --speculation.path "" --train.steps 130 --run.folder FOLDER
    python bench/cold_start.py FOLDER [--json FILE]

The learned drafter takes over in the first ten steps in which it drafts in more than half of the rounds, on average.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from tlt.metrics import write_json

SPAN = 10  # steps
LEARNED = ("eagle",)


def of_step(metrics: dict[str, Any]) -> dict[str, float]:
    rollout = metrics["rollout"]
    rounds = rollout["strategies"]
    learned = sum(count for name, count in rounds.items() if name.split()[0] in LEARNED)
    return {
        "step": metrics["step"],
        "accept_length": metrics["accept_length"],
        "tokens_per_second": metrics["tokens_per_second"],
        "drafter_version": rollout["spot"].get("version", 0),
        "drafter_tokens": rollout["drafter_tokens"],
        "learned_share_of_rounds": learned / sum(rounds.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lines = (arguments.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [of_step(json.loads(line)) for line in lines]
    spans = [steps[i : i + SPAN] for i in range(0, len(steps), SPAN)]
    taken_over = None
    print("steps       accept length   tokens/s   learned drafter's rounds   its version")
    for span in spans:
        mean = {key: statistics.fmean(step[key] for step in span) for key in span[0]}
        first, share = int(span[0]["step"]), mean["learned_share_of_rounds"]
        if taken_over is None and share > 0.5:
            taken_over = first
        print(
            f"{first:4d} - {int(span[-1]['step']):4d} {mean['accept_length']:14.2f} {mean['tokens_per_second']:10.0f} "
            f"{share:20.0%} {int(span[-1]['drafter_version']):20d}"
        )
    print("it never takes over" if taken_over is None else f"it takes over in the {SPAN} steps from {taken_over} on")
    if arguments.json:
        summary = json.loads((arguments.folder / "summary.json").read_text(encoding="utf-8"))
        where = {key: summary[key] for key in ("machine", "versions", "commit")}
        write_json(arguments.json, {"takes_over_at": taken_over, "steps": steps, **where})


if __name__ == "__main__":
    main()
