"""Bits of a row by the number of rows in the pass: does a result depend on what shares a pass with it?

    python bench/rows.py [--shapes 135m] [--rows 1 2 3 ...] [--context 300] [--time] [--no-split-k] [--json FILE]

Each operation is that of the engine, with random weights of the shape: products, norms, head, log-softmax, attention.
It is computed for the first M rows of its input, and for all rows. `differ` is the share of elements with other bits.
Attention is measured by rows of a batch (each with its own context) and by new tokens of one row. At the end, `engine,
rows` decodes M requests at once, prefill included, and `engine, draft` verifies a draft of M - 1 tokens, both with up
to 65. They compare tokens and log-probs. `F.linear` is the product of `down` with the weight as stored in a checkpoint.

With `--time`, `ms` is the median of 20 calls on a CPU, and the time of the device's kernels on CUDA. `--no-split-k`
applies the settings of cuBLAS that forbid split-K sums and sums in bfloat16, as vLLM does on Hopper.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measuring import Results, counts, parser_of, place, seconds_of
from shapes import SHAPES, random_target, shape_config
from torch import Tensor

from tlt.attention.slot_memory import HeadShape
from tlt.attention.slots import attention_for
from tlt.config import EngineConfig
from tlt.draft.drafter import Offer, Prefix, PrefixDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.engine import Engine
from tlt.engine.kv_cache import KVCache
from tlt.engine.sampling_table import sampling_tensors
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.models.families import FAMILIES
from tlt.sampling import request_seed, sampling_log_probs
from tlt.types import MAX_DRAFT_TOKENS, Prompt, Request, SamplingParams

ROWS = (1, 2, 3, 4, 5, 8, 32, 65, 129, 300, 600)
_LAYERS = 2  # of the model; two, so that the second layer's keys depend on attention
_DECODED = 6  # tokens of a response in `engine, rows`
_REQUESTS = 65  # most requests of `engine, rows`, because on a CPU the prefill of 600 takes minutes
_GRAIN = 512  # the cache grows in steps of at most this many tokens
_REPEATS = 20  # timed calls
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # size of a float -> integers with its bits


class Operation(NamedTuple):
    name: str
    most: int
    """largest number of rows"""
    run: Callable[[int], Tensor]
    """function M -> result for the first M rows, [M, ...]"""


def different_share(a: Tensor, b: Tensor) -> float:
    """Return the share of elements that differ in some bit."""
    kind = _WHOLE[a.dtype.itemsize]
    return (a.contiguous().view(kind) != b.contiguous().view(kind)).double().mean().item()


@torch.inference_mode()
def compare(operation: Operation, rows: Sequence[int], timed: bool, device: torch.device) -> dict[str, Any]:
    """Compare an operation on the first rows with the same operation on `operation.most` rows."""
    rows = [number for number in rows if number <= operation.most]
    whole = operation.run(operation.most).clone()
    found: dict[str, Any] = {}
    found["differ"] = {number: different_share(operation.run(number), whole[:number]) for number in rows}
    if timed:
        found["ms"] = {number: milliseconds(partial(operation.run, number), device) for number in rows}
    return found


def milliseconds(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        return counts(work, device, _REPEATS)["device_ms"]
    return 1000 * statistics.median(seconds_of(work, device) for _ in range(_REPEATS))


# -- operations of a layer ---------------------------------------------------------------------------------------------


def layer_operations(target: Decoder, most: int) -> list[Operation]:
    """Return the operations of the target's first layer and of its head, as `Decoder.forward` calls them."""
    o, layer = target.options, target.layers[0]
    sizes = o.hidden_size, o.num_heads * o.head_dim, o.intermediate_size
    x, mixed, wide = (random(target, most, size) for size in sizes)
    stored = random(target, o.hidden_size, o.intermediate_size)
    logits = target.logits(x)
    sampling = sampling_tensors([SamplingParams(temperature=0.8)] * most, target.device)
    order = torch.arange(most, device=target.device)
    runs: dict[str, Callable[[int], Tensor]] = {
        "norm": lambda m: layer.input_norm(x[:m]),
        "qkv": lambda m: layer.qkv(x[:m]),
        "out": lambda m: layer.out(mixed[:m], x[:m]),
        "gate_up": lambda m: layer.gate_up(x[:m]),
        "down": lambda m: layer.down(wide[:m], x[:m]),
        "F.linear": lambda m: F.linear(wide[:m], stored),
        "head": lambda m: target.logits(x[:m]),
        "log_softmax": lambda m: sampling_log_probs(logits[:m], sampling.of(order[:m]))[1],
    }
    return [Operation(name, most, run) for name, run in runs.items()]


def attention_operations(target: Decoder, most: int, context: int) -> list[Operation]:
    o = target.options
    shape = HeadShape(1, o.num_heads, o.num_kv_heads, o.head_dim, target.dtype, target.device)
    query = random(target, most, o.num_heads, o.head_dim)
    key, value = (random(target, most, o.num_kv_heads, o.head_dim) for _ in range(2))
    lengths = [1 + (context // 8 + 37 * row) % context for row in range(most)]

    def run(m: int, store: Any, of_rows: bool) -> Tensor:
        plan = store.plan(0, lengths[:m], 1) if of_rows else store.plan(0, [context], m)
        return store.attend(plan, 0, query[:m], key[:m], value[:m])

    found = []
    for name, slots, tokens in (("rows", most, context + 1), ("draft", 1, context + most)):
        store = attention_for(shape)
        KVCache(store, slots * 2 * (tokens + _GRAIN)).reserve(slots, tokens)  # a capacity as in the engine
        store.memory[0].copy_(random(target, *store.memory[0].shape))
        found.append(Operation(f"attention, {name}", most, partial(run, store=store, of_rows=slots > 1)))
    return found


def random(target: Decoder, *shape: int) -> Tensor:
    """Return normal numbers, the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(target.device, target.dtype)


# -- the engine --------------------------------------------------------------------------------------------------------


class Known(PrefixDrafter):
    """Drafter that proposes known responses."""

    name = "known"

    def __init__(self, responses: dict[int, list[int]]) -> None:
        self.responses = responses

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        tokens = [self.responses[p.request.seed][len(p.committed) + len(p.drafted)] for p in prefixes]
        ids = torch.tensor([[token, -1] for token in tokens])
        return Offer(ids, torch.tensor([[0.0, -torch.inf]]).expand(len(tokens), -1))


def engine_operations(target: Decoder, most: int, context: int) -> list[Operation]:
    def requests(count: int, new_tokens: int) -> list[Request]:
        chance, params = torch.Generator().manual_seed(0), SamplingParams(max_new_tokens=new_tokens)
        lengths = [1 + (context // 8 + 37 * row) % context for row in range(count)]
        texts = [torch.randint(target.options.vocab_size, (length,), generator=chance).tolist() for length in lengths]
        return [
            Request(Prompt(row, "", tuple(text)), 0, 0, request_seed(0, "rows", row, 0, 0), params)
            for row, text in enumerate(texts)
        ]

    def by_rows(m: int) -> Tensor:
        return decoded(Engine(target, EngineConfig(max_rows=m)), requests(m, _DECODED))[0]

    longest = min(most, MAX_DRAFT_TOKENS + 1)
    _, responses = decoded(Engine(target, EngineConfig(max_rows=1)), requests(1, longest))

    def by_draft(m: int) -> Tensor:
        strategy = Strategy(Known.name, m - 1) if m > 1 else PLAIN
        engine = Engine(target, EngineConfig(max_rows=1), [Known(responses)], Fixed(strategy))
        return decoded(engine, requests(1, m))[0][0]

    return [Operation("engine, rows", min(most, _REQUESTS), by_rows), Operation("engine, draft", longest, by_draft)]


def decoded(engine: Engine, requests: Sequence[Request]) -> tuple[Tensor, dict[int, list[int]]]:
    """Decode the requests. Return tokens and log-probs [requests, tokens, 3], and the tokens by seed."""
    found = {response.request.seed: response for response in engine.generate(requests)}
    ordered = [found[request.seed] for request in requests]
    columns = [[*zip(one.token_ids, one.logprobs, one.full_logprobs, strict=True)] for one in ordered]
    return torch.tensor(columns, dtype=torch.float64), {seed: list(one.token_ids) for seed, one in found.items()}


# -- the command -------------------------------------------------------------------------------------------------------


def forbid_split_k() -> None:
    """Apply the settings of vLLM's batch-invariant mode on Hopper. Call this before the first product."""
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
    settings: Any = torch.backends.cuda.matmul
    settings.allow_bf16_reduced_precision_reduction = (False, False)  # (sums in bfloat16, split-K)
    if torch.cuda.is_available():
        torch.backends.cuda.preferred_blas_library("cublaslt")


def main(words: Sequence[str] | None = None) -> int:
    """Compare all operations. Return the exit status."""
    fused = [shape for shape, fields in SHAPES.items() if fields["model_type"] in FAMILIES]
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=fused, default=["135m"])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="the largest is compared with the others")
    parser.add_argument("--context", type=int, default=300, help="longest context in tokens")
    parser.add_argument("--time", action="store_true", help="also time the operations")
    parser.add_argument("--no-split-k", action="store_true", help="apply the settings of cuBLAS that forbid split-K")
    arguments = parser.parse_args(words)
    if arguments.no_split_k:
        forbid_split_k()
    device, dtype = place(arguments)
    options = {name: getattr(arguments, name) for name in ("no_split_k", "context", "time")}
    results = Results(arguments.json, dtype=str(dtype), rows=[*arguments.rows], **options)
    most = max(arguments.rows)
    for shape in arguments.shapes:
        target = random_target(shape_config(shape, num_hidden_layers=_LAYERS), dtype, device)
        operations = layer_operations(target, most) + attention_operations(target, most, arguments.context)
        operations += engine_operations(target, most, arguments.context)
        for one in operations:
            timed = arguments.time and not one.name.startswith("engine")
            work = partial(compare, one, arguments.rows, timed, device)
            results.measure({"shape": shape, "operation": one.name}, work)
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
