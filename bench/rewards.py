"""How much time of slow rewards the rollout hides: 128 responses, each scored in 0.2 s, by waiting or computing.

python bench/rewards.py --json bench/results/rewards.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from tlt.config import parse_config
from tlt.metrics import provenance, write_json
from tlt.rewards import make_reward
from tlt.types import Prompt, Request, Response, SamplingParams

RESPONSES, SECONDS = 128, 0.2
FUNCTIONS = """
import asyncio, time

def waits(prompt, answer):
    time.sleep({seconds})
    return 1.0

async def waits_async(prompt, answer):
    await asyncio.sleep({seconds})
    return 1.0

def computes(prompt, answer):
    until = time.process_time() + {seconds}
    while time.process_time() < until:
        pass
    return 1.0
"""


def measure(name: str, folder: Path, rollout_seconds: float, steps: int) -> list[float]:
    """Seconds that each step waits for its rewards after the rollout, whose responses end at even distances."""
    reward = {"name": f"slow_rewards:{name}", "folder": str(folder)}
    config = parse_config({"model": {"path": "-"}, "data": {"path": "-"}, "reward": reward})
    prompt = Prompt(0, "", (1,))
    made = make_reward(config, [prompt])
    waited = []
    for step in range(steps):
        requests = [Request(prompt, i, step, i, SamplingParams()) for i in range(RESPONSES)]
        responses = [Response(request, [1], [], [], "stop", "x") for request in requests]
        for response in responses:
            time.sleep(rollout_seconds / RESPONSES)
            made.submit(response)
        began = time.perf_counter()
        made(responses)
        waited.append(time.perf_counter() - began)
        assert all(response.reward == 1.0 for response in responses)
    made.close()
    return waited


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rollout", type=float, default=10.0, help="seconds")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", default="waits,waits_async,computes")
    asked = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "slow_rewards.py").write_text(FUNCTIONS.format(seconds=SECONDS), encoding="utf-8")
        for name in asked.only.split(","):
            results[name] = measure(name, Path(folder), asked.rollout, asked.steps)
            hidden = [1 - seconds / (RESPONSES * SECONDS) for seconds in results[name]]
            print(name, [f"{s:.2f} s, {h:.0%} hidden" for s, h in zip(results[name], hidden, strict=True)], flush=True)
    if asked.json:
        facts = {"responses": RESPONSES, "seconds_each": SECONDS, "rollout_seconds": asked.rollout}
        write_json(asked.json, {**facts, "waited": results, **provenance()})


if __name__ == "__main__":
    main()
