"""Update of groups that share a prompt: one copy of the prompt in each group against one copy per response.

    python bench/shared_prefix.py MODEL [--json FILE]

A case is an update on random tokens with one thread: a group of 4, 8 or 16 responses to a prompt of 20, 100 or 500
tokens. Responses have 8 to 58 tokens, 33 on average. The two ways take turns, in a process of their own each, because a
peak of memory never goes down. Seconds are CPU seconds, and the least of the repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS, GROUPS = (20, 100, 500), (4, 8, 16)
NUM_GROUPS = 1


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Do the updates of one case in one way. Returns CPU seconds, MiB, tokens to compute and metrics to compare."""
    import torch

    from tlt.config import RolloutConfig, TrainConfig
    from tlt.rl import planner
    from tlt.rl.policy import Policy

    torch.set_num_threads(1)
    config = TrainConfig(micro_batch_tokens=case["micro_batch_tokens"], learning_rate=1e-9)
    policy = Policy(case["model"], torch.float32, torch.device("cpu"), config, RolloutConfig())
    if not case["shares"]:
        planner.by_prompt = lambda members, prompts: [[i] for i in members]
    batch = make_batch(case["prompt"], case["group"], policy.model.config.vocab_size)
    layouts = policy.passes.packer.plan(batch, range(len(batch.response_ids)))
    tokens = sum(policy.passes.packer.pack(batch, layout).input_ids.numel() for layout in layouts)
    before, seconds, metrics = peak_mib(), [], {}
    for step in range(case["repeats"]):
        start = time.process_time()
        metrics = policy.update(batch, step)
        seconds.append(time.process_time() - start)
    compared = {name: metrics[name] for name in ("loss", "entropy", "grad_norm")}
    return {"cpu_seconds": min(seconds), "before_mib": before, "peak_mib": peak_mib(), "tokens": tokens, **compared}


def make_batch(prompt: int, group: int, vocab: int) -> Any:
    from tlt.types import TrainBatch

    chance = random.Random(0)
    count = NUM_GROUPS * group
    prompts = [tuple(chance.randrange(vocab) for _ in range(prompt)) for _ in range(NUM_GROUPS)]
    responses = [[chance.randrange(vocab) for _ in range(chance.randint(8, 58))] for _ in range(count)]
    advantages = [chance.gauss(0, 1) for _ in range(count)]
    logprobs = [[0.0] * len(response) for response in responses]
    return TrainBatch([prompts[k // group] for k in range(count)], responses, advantages, logprobs)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(case: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, case["model"], "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS)
    parser.add_argument("--groups", type=int, nargs="+", default=GROUPS)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case)))
        return
    results = []
    for prompt in arguments.prompts:
        for group in arguments.groups:
            case = {"model": arguments.model, "prompt": prompt, "group": group, "repeats": arguments.repeats}
            case["micro_batch_tokens"] = arguments.micro_batch_tokens
            apart, shared = (run(case | {"shares": shares}) for shares in (False, True))
            gain = apart["cpu_seconds"] / shared["cpu_seconds"]
            results.append({"prompt": prompt, "group": group, "apart": apart, "shared": shared, "gain": gain})
            print(
                f"prompt {prompt}, groups of {group}: {apart['cpu_seconds']:.1f} s and {apart['peak_mib']:,.0f} MiB "
                f"apart, {shared['cpu_seconds']:.1f} s and {shared['peak_mib']:,.0f} MiB shared, {gain:.2f} times",
                flush=True,
            )
    if arguments.json:
        from tlt.metrics import provenance, write_json

        facts = {"model": arguments.model, "micro_batch_tokens": arguments.micro_batch_tokens}
        write_json(arguments.json, {**facts, "cases": results, **provenance()})


if __name__ == "__main__":
    main()
