"""Peak resident memory of an update with a vocabulary of 151,936: log-probs of all tokens at once, and in chunks.

    python bench/update_memory.py [--json FILE]

The model is a random Qwen3 of two layers and hidden size 128: all but the vocabulary is small. A case does two updates,
so that Adam's moments exist, with 2,048 response tokens in one micro-batch. Each case runs in a process of its own,
because a peak never goes down.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VOCAB, WIDTH, RESPONSES, TOKENS = 151_936, 128, 8, 256
CASES = {
    "all at once": {"logits_mb": 2**20},
    "chunks of 256 MiB": {"logits_mb": 256},
    "chunks of 64 MiB": {"logits_mb": 64},
    "chunks of 64 MiB, layers computed anew": {"logits_mb": 64, "gradient_checkpointing": True},
}


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Do two updates with these [train] settings. Returns MiB, seconds, and metrics to compare cases by."""
    import torch

    from tlt.config import RolloutConfig, TrainConfig
    from tlt.rl.policy import Policy
    from tlt.types import TrainBatch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (RESPONSES, TOKENS), generator=generator).tolist()
    advantages = torch.randn(RESPONSES, generator=generator).tolist()
    batch = TrainBatch([(1, 2)] * RESPONSES, tokens, advantages, [[0.0] * TOKENS] * RESPONSES)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        config = TrainConfig(micro_batch_tokens=RESPONSES * (TOKENS + 2), **settings)
        policy = Policy(folder, torch.float32, torch.device("cpu"), config, RolloutConfig())
    before = peak_mib()
    start = time.perf_counter()
    metrics = [policy.update(batch, step) for step in range(2)]
    seconds = time.perf_counter() - start
    compared = {name: metrics[-1][name] for name in ("loss", "entropy", "grad_norm")}
    return {**settings, "before_mib": before, "peak_mib": peak_mib(), "seconds": seconds, **compared}


def save_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH // 4,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case)))
        return
    whole = RESPONSES * TOKENS * VOCAB * 4 / 2**20
    print(f"one float32 tensor of {RESPONSES * TOKENS:,} tokens by {VOCAB:,} is {whole:,.0f} MiB")
    results = {}
    for name, case in CASES.items():
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results[name] = r = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {r['before_mib']:,.0f} MiB before, {r['peak_mib']:,.0f} MiB at peak, {r['seconds']:.0f} s")
    if arguments.json:
        from tlt.metrics import provenance, write_json

        write_json(arguments.json, {"logits_mib": whole, "cases": results, **provenance()})


if __name__ == "__main__":
    main()
