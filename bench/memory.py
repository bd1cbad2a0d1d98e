"""Peak resident memory of 256 requests of up to 1,024 tokens, with room for all and with a cache too small for all.

    python bench/memory.py [--json FILE]

Each case runs in a process of its own, because a peak never goes down.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

from tlt.config import load_config

ROOT = Path(__file__).resolve().parent.parent
CASES = {"256 rows at once": (256, 1024), "64 rows, 128 MiB of cache": (64, 128)}
REQUESTS = 256


def measure(max_rows: int, kv_memory_mb: int) -> dict[str, float]:
    """Decode, with nothing that stops a response before its own bound of tokens. Returns MiB, counts and seconds."""
    import torch

    from tlt.engine.engine import Engine
    from tlt.models.choose import make_target
    from tlt.models.weights import read_safetensors
    from tlt.types import Prompt, Request, SamplingParams

    config = load_config(ROOT / "recipes" / "quickstart.toml")
    target = make_target(config.model)
    target.load(read_safetensors(config.model.path), version=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 1025, (REQUESTS,), generator=generator).tolist()
    prompts = torch.randint(target.options.vocab_size, (REQUESTS, 48), generator=generator).tolist()
    requests = [
        Request(Prompt(i, "", tuple(p)), 0, 0, i, SamplingParams(max_new_tokens=n))
        for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    engine = Engine(target, config.engine.model_copy(update={"max_rows": max_rows, "kv_memory_mb": kv_memory_mb}))
    finished = sum(1 for _ in engine.generate(requests))
    assert finished == REQUESTS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    stats = engine.stats
    return {
        "max_rows": max_rows,
        "kv_memory_mb": kv_memory_mb,
        "finished": finished,
        "tokens": stats.tokens,
        "preemptions": stats.preemptions,
        "before_mib": before,
        "peak_mib": peak,
        "seconds": sum(stats.seconds.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(*arguments.case)))
        return
    results = {}
    for name, case in CASES.items():
        command = [sys.executable, __file__, "--case", *map(str, case)]
        results[name] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        r = results[name]
        print(f"{name}: peak {r['peak_mib']:.0f} MiB, {r['preemptions']} preemptions, {r['seconds']:.0f} s")
    if arguments.json:
        from tlt.metrics import provenance, write_json

        write_json(arguments.json, {"cases": results, **provenance()})


if __name__ == "__main__":
    main()
