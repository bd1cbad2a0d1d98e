"""Cost of one update of a policy with random weights: milliseconds, operations, launches and peak memory.

    python bench/update_cost.py [--shapes 135m 1.5b] [--responses 32] [--tokens 128 512] [--prompts 128] [--group 8]
        [--ways shared apart nondeterministic] [--json FILE]

An update is `Policy.update` on random tokens: gradients of all responses, and a step of AdamW. Responses have a quarter
of `--tokens` up to `--tokens` tokens. `shared` computes a prompt once per group, as a run does, and `apart` once per
response. `nondeterministic` is `shared` with train.deterministic = false, which matters on CUDA only.

`ms` is the median of the repeats after a first update, and `cpu_ms` the process time of the same updates. `tokens` are
those of all micro-batches, padding included. `operations` are those that the host starts. On a CPU figures of a device
are null.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from measuring import Results, counts, parser_of, peak_mib, place, seconds_of
from shapes import SHAPES, RandomPolicy

from tlt.config import TrainConfig
from tlt.types import TrainBatch

WAYS = ("shared", "apart", "nondeterministic")


class Case(NamedTuple):
    """Measured update: `responses` to prompts of `prompt` tokens, in groups of `group`, of up to `tokens` tokens."""

    shape: str
    responses: int
    prompt: int
    tokens: int
    group: int
    way: str


def make_batch(vocab_size: int, responses: int, prompt: int, tokens: int, group: int) -> TrainBatch:
    """Return random groups that share a prompt, with advantages of both signs."""
    chance = random.Random(0)
    prompts = [tuple(chance.randrange(vocab_size) for _ in range(prompt)) for _ in range(-(-responses // group))]
    lengths = [chance.randint(max(1, tokens // 4), tokens) for _ in range(responses)]
    answers = [[chance.randrange(vocab_size) for _ in range(length)] for length in lengths]
    advantages = [(-1.0) ** i for i in range(responses)]
    return TrainBatch(
        [prompts[i // group] for i in range(responses)], answers, advantages, [[0.0] * length for length in lengths]
    )


def measure(case: Case, dtype: torch.dtype, device: torch.device, repeats: int, micro: int) -> dict[str, Any]:
    config = TrainConfig(learning_rate=1e-9, micro_batch_tokens=micro, deterministic=case.way != "nondeterministic")
    policy = RandomPolicy(case.shape, dtype, device, config)
    packer = policy.passes.packer
    packer.shares &= case.way != "apart"
    batch = make_batch(policy.model.config.vocab_size, case.responses, case.prompt, case.tokens, case.group)
    layouts = packer.plan(batch, range(case.responses))
    update = partial(policy.update, batch, 0)
    with peak_mib(device) as peak:
        update()
        began = time.process_time()
        seconds = [seconds_of(update, device) for _ in range(repeats)]
        cpu = (time.process_time() - began) / repeats
        found = counts(update, device, times=1)
    return {
        "ms": 1000 * statistics.median(seconds),
        "cpu_ms": 1000 * cpu,
        "micro_batches": len(layouts),
        "computed_tokens": sum(packer.pack(batch, layout).input_ids.numel() for layout in layouts),
        "parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
        **found,
        **peak,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure all cases. Return the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "1.5b"])
    parser.add_argument("--responses", type=int, nargs="+", default=[32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="longest response")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128], help="tokens of a prompt")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(words)
    device, dtype = place(arguments)
    facts = {"dtype": str(dtype), "micro_batch_tokens": arguments.micro_batch_tokens, "repeats": arguments.repeats}
    results = Results(arguments.json, **facts)
    options = (arguments.shapes, arguments.responses, arguments.prompts, arguments.tokens, [arguments.group])
    for case in map(Case._make, product(*options, arguments.ways)):
        work = partial(measure, case, dtype, device, arguments.repeats, arguments.micro_batch_tokens)
        results.measure(case._asdict(), work)
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
