"""Times the first rollouts of a run, adaptive against plain decoding in turn, on the same requests.

    OMP_NUM_THREADS=1 python bench/first_step.py MODEL [--batches 1 4 16] [--temperatures 1.0 0.6] [--tokens 128]
        [--repeats 3] [--json FILE]

Each repeat has a new engine of either kind and three rollouts of one batch. `ratio` is plain seconds over adaptive
seconds of one rollout; medians over the repeats are reported. These are CPU seconds of one thread, so that they do not
depend on what else the machine does. `start_seconds` is what the start-up profile takes, by wall clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tlt.build import load_engine, load_tokenizer
from tlt.data.sampling_params import stop_token_ids
from tlt.engine.bandit import Bandit
from tlt.engine.engine import Engine
from tlt.metrics import provenance, write_json
from tlt.types import Prompt, Request, SamplingParams

PROMPTS = Path(__file__).parent / "prompts.jsonl"
ROLLOUTS = 3


def prompts(tokenizer: Any) -> list[Prompt]:
    """Return the questions as chat prompts."""
    found = []
    for number, line in enumerate(PROMPTS.read_text(encoding="utf-8").splitlines()):
        asked = [{"role": "user", "content": json.loads(line)["question"]}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        found.append(Prompt(number, text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])))
    return found


def requests(asked: Sequence[Prompt], batch: int, rollout: int, params: SamplingParams) -> list[Request]:
    first = rollout * batch
    return [Request(asked[n % len(asked)], n // len(asked), 0, 1000 + n, params) for n in range(first, first + batch)]


def timed(engine: Engine, asked: Sequence[Request]) -> tuple[float, dict[int, list[int]]]:
    began = time.process_time()
    tokens = {response.request.seed: response.token_ids for response in engine.generate(asked)}
    return time.process_time() - began, tokens


def measure(model: str, asked: Sequence[Prompt], batch: int, params: SamplingParams) -> dict[str, Any]:
    """Return what three rollouts take, with a new engine of either kind."""
    plain, adaptive = (load_engine(model, {"drafter": drafter}) for drafter in ("off", "adaptive"))
    assert isinstance(plain, Engine)
    assert isinstance(adaptive, Engine)
    assert isinstance(adaptive.tuner, Bandit)
    began = time.perf_counter()
    adaptive.tuner.rollout_begins()  # takes the profile
    found: dict[str, Any] = {"start_seconds": time.perf_counter() - began, "rollouts": []}
    timed(plain, requests(asked, batch, ROLLOUTS, params))  # else one of them would pay for being the first
    for rollout in range(ROLLOUTS):
        these = requests(asked, batch, rollout, params)
        order = [plain, adaptive] if rollout % 2 else [adaptive, plain]
        took = {engine: timed(engine, these) for engine in order}
        (plain_seconds, plain_tokens), (seconds, tokens) = took[plain], took[adaptive]
        rounds = sum(adaptive.stats.strategies.values())
        found["rollouts"].append(
            {
                "tokens": sum(map(len, tokens.values())),
                "same": tokens == plain_tokens,
                "plain_seconds": plain_seconds,
                "adaptive_seconds": seconds,
                "drafted_rounds": 1 - adaptive.stats.strategies.get("plain", 0) / rounds,
                "lost_share": adaptive.tuner.lost / adaptive.tuner.spent,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(arguments.model)
    asked, stops = prompts(tokenizer), stop_token_ids(arguments.model, tokenizer)
    cases = []
    for batch, temperature in itertools.product(arguments.batches, arguments.temperatures):
        params = SamplingParams(temperature, max_new_tokens=arguments.tokens, stop_token_ids=stops)
        runs = [measure(arguments.model, asked, batch, params) for _ in range(arguments.repeats)]
        ratios = [
            statistics.median(r["rollouts"][n]["plain_seconds"] / r["rollouts"][n]["adaptive_seconds"] for r in runs)
            for n in range(ROLLOUTS)
        ]
        start = statistics.median(run["start_seconds"] for run in runs)
        same = all(rollout["same"] for run in runs for rollout in run["rollouts"])
        times = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"batch {batch}, temperature {temperature}: start {start:.1f} s, times as fast as plain {times}, {same=}",
            flush=True,
        )
        cases.append(
            {"batch": batch, "temperature": temperature, "ratio": ratios, "start_seconds": start, "runs": runs}
        )
    if arguments.json:
        write_json(arguments.json, {"cases": cases, **provenance()})


if __name__ == "__main__":
    main()
