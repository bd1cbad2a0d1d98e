"""`tlt bench rollout`: tokens per second by batch size and strategy on the recipe's own prompts, and beside the peers.

All strategies decode the same requests to the same tokens (asserted), in turn, so a ratio compares the very same work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tlt.bench.peers import peers
from tlt.cluster.local import LocalRollout, load_tokenizer, make_drafter, make_target, sampling_params
from tlt.config import Config
from tlt.data import load_prompts
from tlt.draft.drafter import Drafter
from tlt.draft.suffix import SuffixDrafter
from tlt.draft.tree import Strategy
from tlt.engine.engine import PLAIN, Engine
from tlt.metrics import provenance, write_json
from tlt.models.decoder import Decoder
from tlt.models.weights import read_safetensors
from tlt.sampling import request_seed
from tlt.types import Prompt, Request, Response, SamplingParams

_PEER_PROMPT, _PEER_TOKENS = 64, 128


def bench_rollout(
    config: Config, batches: Sequence[int], repeats: int, with_peers: bool, json_file: Path | None
) -> None:
    console = Console(highlight=False)
    tokenizer = load_tokenizer(config.model.path)
    target = make_target(config.model)
    target.load(read_safetensors(config.model.path), version=0)
    prompts = load_prompts(config.data, lambda text: tokenizer(text)["input_ids"])
    rows: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    with console.status("") as status:
        for batch in batches:
            status.update(f"batch {batch}: strategies")
            rows += _strategies(
                config, target, prompts, sampling_params(config.rollout, config.model.path, tokenizer), batch, repeats
            )
            if with_peers:
                status.update(f"batch {batch}: peers")
                beside += _beside_peers(config, target, batch, repeats)
    _print(console, rows, beside)
    if json_file:
        write_json(
            json_file, {"rows": rows, "peers": beside, "dtype": config.model.dtype, "repeats": repeats, **provenance()}
        )


# -- strategies --------------------------------------------------------------------------------------------------------


def _strategies(
    config: Config, target: Decoder, prompts: Sequence[Prompt], params: Any, batch: int, repeats: int
) -> list[dict[str, Any]]:
    """Plain against suffix drafting, which starts with nothing or with an earlier epoch of the same prompts."""
    groups = max(2, 2 * batch // config.rollout.group_size)

    def requests(epoch: int) -> list[Request]:
        return [
            Request(prompts[i], k, epoch, request_seed(config.run.seed, "bench", i, epoch, k), params)
            for i in range(min(groups, len(prompts)))
            for k in range(config.rollout.group_size)
        ]

    drafter, strategy = make_drafter(config.speculation)
    strategies: dict[str, tuple[type[SuffixDrafter] | None, Strategy]] = {"plain": (None, PLAIN)}
    if drafter is not None:
        strategies |= {"suffix": (SuffixDrafter, strategy), "suffix after an epoch": (SuffixDrafter, strategy)}
    history = _decode(config, target, batch, None, PLAIN, requests(0))[1] if drafter is not None else []
    speeds: dict[str, list[float]] = {name: [] for name in strategies}
    accept: dict[str, float] = {}
    reference: dict[int, list[int]] | None = None
    for _ in range(repeats):
        for name, (kind, how) in strategies.items():
            fresh = kind(config.speculation.history_tokens) if kind else None
            if fresh and name == "suffix after an epoch":
                _teach(fresh, history)
            seconds, responses, engine = _decode(config, target, batch, fresh, how, requests(1))
            tokens = {r.request.seed: r.token_ids for r in responses}
            reference = reference or tokens
            different = sum(tokens[seed] != ids for seed, ids in reference.items())
            assert config.model.dtype == "bfloat16" or different <= 1, (
                f"{different} responses of {name} differ from plain"
            )
            speeds[name].append(engine.stats.tokens / seconds)
            accept[name] = engine.stats.accept_length
    return [
        {
            "batch": batch,
            "strategy": name,
            "tokens_per_second": statistics.median(speeds[name]),
            "accept_length": accept[name],
            "ratio_to_plain": statistics.median(a / b for a, b in zip(speeds[name], speeds["plain"], strict=True)),
        }
        for name in strategies
    ]


def _decode(
    config: Config,
    target: Decoder,
    batch: int,
    drafter: Drafter | None,
    strategy: Strategy,
    requests: Sequence[Request],
) -> tuple[float, list[Response], Engine]:
    engine = Engine(target, config.engine.model_copy(update={"max_rows": batch}), drafter, strategy)
    _synchronize(target.device)
    start = time.perf_counter()
    responses, _ = LocalRollout(engine).generate(requests, lambda _: None)
    _synchronize(target.device)
    return time.perf_counter() - start, responses, engine


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _teach(drafter: SuffixDrafter, responses: Sequence[Response]) -> None:
    for response in responses:
        drafter.open(response.request, [])
        drafter.commit(response.request, response.token_ids)
        drafter.close(response.request)


# -- peers -------------------------------------------------------------------------------------------------------------


def _beside_peers(config: Config, target: Decoder, batch: int, repeats: int) -> list[dict[str, Any]]:
    """Plain decoding here and there: `batch` prompts of 64 tokens, 128 new tokens each, nothing stops early."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = target.options.vocab_size
    prompts = torch.randint(vocab_size, (batch, _PEER_PROMPT), generator=generator).tolist()
    params = SamplingParams(max_new_tokens=_PEER_TOKENS)
    requests = [Request(Prompt(i, "", tuple(p)), 0, 0, i, params) for i, p in enumerate(prompts)]

    def ours() -> None:
        _decode(config, target, batch, None, PLAIN, requests)

    contenders = {"tlt plain": ours, **peers(config.model, target.device, prompts, _PEER_TOKENS)}
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):  # the first round warms up
        for name, decode in contenders.items():
            start = time.perf_counter()
            decode()
            _synchronize(target.device)
            if repeat:
                speeds[name].append(batch * _PEER_TOKENS / (time.perf_counter() - start))
    own = speeds.pop("tlt plain")
    return [
        {
            "batch": batch,
            "name": name,
            "tokens_per_second": statistics.median(theirs),
            "tlt_tokens_per_second": statistics.median(own),
            "tlt_ratio": statistics.median(a / b for a, b in zip(own, theirs, strict=True)),
        }
        for name, theirs in speeds.items()
    ]


def _print(console: Console, rows: Sequence[dict[str, Any]], beside: Sequence[dict[str, Any]]) -> None:
    table = Table(
        "batch", "strategy", "tokens/s", "accept length", "against plain", title="rollout, the recipe's prompts"
    )
    for row in rows:
        numbers = (f"{row['tokens_per_second']:,.0f}", f"{row['accept_length']:.2f}", f"{row['ratio_to_plain']:.2f}")
        table.add_row(str(row["batch"]), row["strategy"], *numbers)
    console.print(table)
    if beside:
        title = f"plain decoding, {_PEER_PROMPT} + {_PEER_TOKENS} tokens"
        table = Table("batch", "engine", "tokens/s", "tlt plain tokens/s", "tlt against it", title=title)
        for row in beside:
            numbers = (f"{row[key]:,.0f}" for key in ("tokens_per_second", "tlt_tokens_per_second"))
            table.add_row(str(row["batch"]), row["name"], *numbers, f"{row['tlt_ratio']:.2f}")
        console.print(table)
