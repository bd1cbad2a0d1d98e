"""Times target passes and plain decoding with packed weights, with plain weights, and by transformers, in turn.

    python bench/pass_cost.py MODEL_FOLDER [--dtype float32] [--threads 1 2] [--repeats 9] [--tokens 32] --json FILE

A pass is the forward over M rows of one sequence and their logits: verifying M - 1 draft tokens. Decoding is of 64
random prompt tokens and `--tokens` new ones at temperature 1, with no early stop. Each number of a repeat is of one
pass or one batch. Milliseconds are medians, and ratios are medians of the repeats' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tlt.bench.peers import peers
from tlt.config import EngineConfig, ModelConfig
from tlt.engine.engine import Engine
from tlt.metrics import provenance, write_json
from tlt.models import product
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options, read_config
from tlt.models.weights import read_safetensors
from tlt.types import Prompt, Request, SamplingParams
from tlt.verify.oracle import causal_hidden

ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
BATCHES = (1, 8, 32)
PROMPT = 64
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9, help="of a pass; a third as many of decoding")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"model": Path(arguments.model).name, "dtype": arguments.dtype, "tokens": arguments.tokens}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        targets = load(arguments.model, arguments.dtype)
        found[f"{threads} threads"] = {
            "pass": [of_a_pass(targets, rows, arguments.repeats) for rows in ROWS],
            "decoding": [of_decoding(targets, arguments, batch) for batch in BATCHES],
        }
        write_json(arguments.json, {**provenance(), **found})


def load(folder: str, dtype: str) -> dict[str, Decoder]:
    """Load the model with plain weights, and with what the timing at load chooses."""
    state, options = read_safetensors(folder), decoder_options(read_config(folder))
    plain, packed = (Decoder(options, getattr(torch, dtype), CPU) for _ in range(2))
    with patch.object(product, "packed_from", lambda *key: product.NEVER):
        plain.load(state, 0)
    packed.load(state, 0)
    return {"plain": plain, "packed": packed}


def of_a_pass(targets: Mapping[str, Decoder], rows: int, repeats: int) -> dict[str, Any]:
    tokens = torch.arange(rows)[None]
    ways = {
        name: lambda target=target: target.logits(causal_hidden(target, tokens)) for name, target in targets.items()
    }
    seconds = in_turn(ways, repeats)
    milliseconds = {name: 1000 * statistics.median(took) for name, took in seconds.items()}
    found = {"rows": rows, "ms": milliseconds, "plain_over_packed": ratio(seconds["plain"], seconds["packed"])}
    print(found, flush=True)
    return found


def of_decoding(targets: Mapping[str, Decoder], arguments: argparse.Namespace, batch: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    vocab_size = targets["packed"].options.vocab_size
    prompts = torch.randint(vocab_size, (batch, PROMPT), generator=generator).tolist()
    params = SamplingParams(max_new_tokens=arguments.tokens)
    requests = [Request(Prompt(i, "", tuple(prompt)), 0, 0, i, params) for i, prompt in enumerate(prompts)]
    engines = {name: Engine(target, EngineConfig(max_rows=batch)) for name, target in targets.items()}
    config = ModelConfig(path=arguments.model, dtype=arguments.dtype)
    peer = "transformers.generate"
    ways: dict[str, Callable[[], Any]] = {
        name: lambda engine=engine: list(engine.generate(requests)) for name, engine in engines.items()
    }
    ways[peer] = peers(config, CPU, prompts, arguments.tokens)[peer]
    seconds = in_turn(ways, max(1, arguments.repeats // 3))
    found = {
        "batch": batch,
        "tokens_per_second": {n: batch * arguments.tokens / statistics.median(took) for n, took in seconds.items()},
        "packed_over_plain": ratio(seconds["plain"], seconds["packed"]),
        "packed_over_transformers": ratio(seconds[peer], seconds["packed"]),
    }
    print(found, flush=True)
    return found


def in_turn(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Time each way once a repeat; a first repeat warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


if __name__ == "__main__":
    main()
