"""Milliseconds of a decoding round with random weights, by model shape, batch, context and draft: host, device, floor.

    python bench/gpu_rounds.py [--shapes 135m 1.5b 7b] [--batches 1 32] [--contexts 512] [--chains 0 4] [--json FILE]
    python bench/gpu_rounds.py --train --shapes 1.5b --batches 256 --contexts 2048 --steps 2

A round is `Engine.round`: all rows decode a fixed strategy. Chain 0 is plain decoding. Chain N is a chain of N draft
tokens by a learned drafter (EAGLE-1, the target's layer sizes) with random weights, verified as always. All rows have
the same prompt, so that the prefill is short. `--mixed` gives them the context, a half, a quarter, an eighth and a
sixteenth of it in turn.

`ms` is the median of the timed rounds. `device_ms`, `launches` and copies are means of profiled rounds. `operations`
are those that the host starts in a round. `captures` counts CUDA graphs captured before and in the timed rounds. The
first case also counts the empty graph that keeps the memory of all graphs.

`floor_mib` are the bytes that a round must read: all weights but the embedding's, keys and values, and the drafter's
weights for each draft token. `ms_over_floor` compares `ms` with the time of reading them at `--bandwidth`. On a CPU
figures of a device are null. With `--by-torch`, attention and sampling are computed by PyTorch, as on GPUs without
Triton.

With `--train`, a policy in float32 with AdamW is in memory too. Each step decodes some rounds, releases the cache, does
an update of 8 responses, and loads the new weights. The peak of memory in each phase is reported.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from measuring import Results, bandwidth, counted_captures, counts, parser_of, peak_mib, place, seconds_of
from shapes import SHAPES, RandomPolicy, random_target, shape_config, weights_read
from update_cost import make_batch

from tlt.attention import slots as attention_slots
from tlt.attention.slot_memory import HeadShape
from tlt.config import EngineConfig, TrainConfig
from tlt.draft.eagle import EagleLayer, Kind, eagle_options
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import LEARNED, PLAIN, Strategy
from tlt.engine import runner
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.models.loading import decoder_for
from tlt.sampling import request_seed
from tlt.types import Prompt, Request, SamplingParams

KIND: Kind = "eagle1"
WINDOW = 512
"""kind and attention window of the drafter"""
_HEADROOM = 64  # tokens that must be free in each row, so that the engine admits the next
_PROFILED = 3  # rounds that are profiled, after the timed ones
_MIXED = 5  # number of different contexts with --mixed
_TRAINED, _DECODED = 8, 8  # responses of an update, and tokens that a row decodes, with --train


class Case(NamedTuple):
    """Rounds of `batch` rows, which have a prompt of `context` tokens and `chain` draft tokens per round."""

    batch: int
    context: int
    chain: int
    mixed: bool


def requests(case: Case, vocab_size: int, new_tokens: int) -> list[Request]:
    """Return one request per row. Rows of the same context have the same prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths = [max(1, case.context >> halvings) for halvings in range(_MIXED if case.mixed else 1)]
    texts = [tuple(torch.randint(vocab_size, (length,), generator=generator).tolist()) for length in lengths]
    prompts = [Prompt(number, "", text) for number, text in enumerate(texts)]
    params = SamplingParams(max_new_tokens=new_tokens)
    return [
        Request(prompts[row % len(prompts)], row, 0, request_seed(0, "bench", 0, 0, row), params)
        for row in range(case.batch)
    ]


def open_engine(target: Decoder, case: Case) -> Engine:
    """Return an engine that decodes with the case's strategy only."""
    config = EngineConfig(max_rows=case.batch)
    if not case.chain:
        return Engine(target, config, tuner=Fixed(PLAIN))
    torch.manual_seed(0)
    with target.device:
        layer = EagleLayer(eagle_options(target.options, KIND, WINDOW))
    tuner = Fixed(Strategy(LEARNED, case.chain))
    return Engine(target, config, [EagleDrafter(layer, target)], tuner, layout=layer.options.layout)


def measure_rounds(
    target: Decoder, config: Any, case: Case, warm: int, rounds: int, speed: float | None
) -> dict[str, Any]:
    """Return the figures of one case. `speed` is the memory bandwidth in GB/s."""
    new_tokens = (warm + rounds + _PROFILED + 2) * (case.chain + 1)
    with peak_mib(target.device) as peak, counted_captures() as captured:
        engine = open_engine(target, case)
        if not engine.cache.fits(case.batch, case.context + new_tokens + _HEADROOM):
            return {"skipped": f"the key-value cache has room for {engine.cache.bound_tokens} tokens"}
        engine.start(requests(case, target.options.vocab_size, new_tokens))
        for _ in range(warm):
            engine.round()
        assert len(engine.rows) == case.batch, "all rows must be active"
        warmed, before = captured["captures"], engine.stats.tokens
        seconds = [seconds_of(engine.round, target.device) for _ in range(rounds)]
        found = {
            "ms": 1000 * statistics.median(seconds),
            "tokens_per_round": (engine.stats.tokens - before) / rounds,
            "captures": [warmed, captured["captures"] - warmed],
        }
        floor = floor_bytes(target, config, [row.kv_length for row in engine.rows], case.chain)
        found |= counts(engine.round, target.device, _PROFILED)
        assert engine.stats.drafter_failures == 0, "the drafter failed"
    return found | over_floor(found, floor, speed) | peak


# -- the floor ---------------------------------------------------------------------------------------------------------


def over_floor(found: dict[str, Any], floor: int, speed: float | None) -> dict[str, Any]:
    """Compare the milliseconds of a round with the time that reading `floor` bytes takes at `speed` GB/s."""
    ms = floor / speed / 1e6 if speed else None
    ratios = {f"{name}_over_floor": found[name] / ms if ms and found[name] else None for name in ("ms", "device_ms")}
    return {"floor_mib": floor / 2**20, "floor_ms": ms, **ratios}


def floor_bytes(target: Decoder, config: Any, contexts: Sequence[int], chain: int) -> int:
    """Return the bytes of weights, keys and values that a round must read at least once. `contexts` are the numbers of
    tokens of the rows."""
    total = weights_read(config) * target.dtype.itemsize
    total += sum(kv_bytes(target, config, context) for context in contexts)
    if chain:
        with torch.device("meta"):
            layer = EagleLayer(eagle_options(target.options, KIND, WINDOW))
        numbers = sum(p.numel() for p in layer.parameters())
        numbers += layer.options.draft_vocab_size * layer.options.hidden_size  # the head
        total += chain * numbers * target.dtype.itemsize
    return total


def kv_bytes(target: Decoder, config: Any, context: int) -> int:
    """Return the size of the keys and values that a row of `context` tokens attends to."""
    shape = HeadShape.of(target.options, target.dtype, target.device)
    types = getattr(config, "layer_types", None) or ["full_attention"] * shape.num_layers
    seen = [min(context, config.sliding_window) if kind == "sliding_attention" else context for kind in types]
    return sum(seen) * shape.bytes_per_token // shape.num_layers


# -- memory of training ------------------------------------------------------------------------------------------------


def measure_training(shape: str, dtype: torch.dtype, device: torch.device, case: Case, steps: int) -> dict[str, Any]:
    """Return the peak memory and the seconds of each phase of a step. If the memory does not suffice, `skipped` names
    the phase."""
    found: dict[str, Any] = {}
    try:
        for phase, work in training(shape, dtype, device, case, steps):
            found["skipped"] = f"out of memory in the {phase}"
            with peak_mib(device) as peak:
                seconds = seconds_of(work, device)
            found[f"{phase}_seconds"] = seconds
            if peak["peak_mib"]:
                found[f"{phase}_mib"] = max(peak["peak_mib"], found.get(f"{phase}_mib", 0.0))
            del found["skipped"]
    except torch.OutOfMemoryError:
        pass
    return found


def training(
    shape: str, dtype: torch.dtype, device: torch.device, case: Case, steps: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the phases of training steps: a name, and the work of the phase."""
    config = shape_config(shape)
    made: dict[str, Any] = {}

    def policy() -> None:
        made["policy"] = RandomPolicy(shape, dtype, device, TrainConfig(learning_rate=1e-9))
        made["target"] = decoder_for(config, dtype, device)

    def rollout() -> None:
        engine = open_engine(made["target"], case)
        engine.start(requests(case, config.vocab_size, _DECODED))
        while engine.busy:
            engine.round()
        engine.release()

    batch = make_batch(config.vocab_size, _TRAINED, case.context // 2, case.context // 2, _TRAINED)
    yield "policy", policy
    for _ in range(steps):
        yield "load", lambda: made["target"].load(made["policy"].state_dict(), 0)
        yield "rollout", rollout
        yield "update", lambda: made["policy"].update(batch, 0)


# -- the command -------------------------------------------------------------------------------------------------------


def measure_shape(shape: str, results: Results, arguments: argparse.Namespace, speed: float | None) -> None:
    device, dtype = place(arguments)
    config = shape_config(shape)
    target = cache(lambda: random_target(config, dtype, device))  # made at the first case that is not in the file
    for values in product(arguments.batches, arguments.contexts, arguments.chains, [arguments.mixed]):
        case = Case(*values)

        def work(case: Case = case) -> dict[str, Any]:
            if arguments.train:
                return measure_training(shape, dtype, device, case, arguments.steps)
            return measure_rounds(target(), config, case, arguments.warm, arguments.rounds, speed)

        results.measure({"shape": shape, **case._asdict(), "steps": arguments.train * arguments.steps}, work)


def main(words: Sequence[str] | None = None) -> int:
    """Measure all cases. Return the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "1.5b", "7b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512], help="tokens of a prompt")
    parser.add_argument("--chains", type=int, nargs="+", default=[0, 4], help="draft tokens per round; 0: plain")
    parser.add_argument("--mixed", action="store_true", help="rows with shorter contexts too")
    parser.add_argument("--warm", type=int, default=8, help="rounds before the timed ones, at least 1")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds")
    parser.add_argument("--by-torch", action="store_true", help="attention and sampling without the Triton kernels")
    parser.add_argument("--train", action="store_true", help="measure the memory of training steps")
    parser.add_argument("--steps", type=int, default=2, help="training steps, with --train")
    parser.add_argument("--bandwidth", type=float, help="of the memory in GB/s; default: measured by copying 1 GiB")
    arguments = parser.parse_args(words)
    device, dtype = place(arguments)
    speed = arguments.bandwidth or bandwidth(device)
    if arguments.by_torch:
        attention_slots.has_kernels = runner.has_kernel = lambda _: False
    options = {name: getattr(arguments, name) for name in ("rounds", "warm", "by_torch")}
    results = Results(arguments.json, dtype=str(dtype), **options)
    results.tree["bandwidth"] = speed
    for shape in arguments.shapes:
        measure_shape(shape, results, arguments, speed)
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
