"""Tokens per second of vLLM with tlt's noise, by batch size and drafter: `rollout.py --engine.backend vllm`.

All engines decode the same requests to the same tokens, one after another in this process, several times. The tokens
are compared with those of tlt's own engine, which is measured too, with plain decoding and with `adaptive`. Plain vLLM
is compiled, unless `engine.vllm.enforce_eager` is set."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from older_target import decode_ahead, trained
from rich.console import Console
from rich.table import Table
from rollout import bench_requests

from tlt.build import Workplace, load_detokenizer, open_target, open_workplace
from tlt.config import Config
from tlt.draft.ahead import AheadStore
from tlt.engine.backend import make_engine
from tlt.engine.engine import Engine
from tlt.engine.protocol import RolloutEngine
from tlt.metrics import provenance, write_json
from tlt.models.choose import make_target
from tlt.models.decoder import Decoder
from tlt.models.weights import read_safetensors
from tlt.progress import working
from tlt.store.hub import from_hub
from tlt.types import RolloutStats
from tlt.vllm.engine import VllmEngine
from tlt.vllm.target import VllmTarget
from tlt.vllm.versions import vllm_version

_MOST_FORKS = 2e-5  # responses that rounding may change, as a fraction of all tokens


class _VllmContender(NamedTuple):
    name: str
    engine: RolloutEngine
    looks_ahead: bool = False


def bench_vllm(config: Config, batches: Sequence[int], repeats: int, json_file: Path | None, look_ahead: int) -> None:
    """Measure the tokens per second of each engine and print a table. `look_ahead` is the number of policy updates
    between the older and the present target; 0 turns look-ahead off."""
    console, config = Console(highlight=False), from_hub(config)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"max_rows": max(batches)})})
    place = open_workplace(config)
    present, older, now = place.target, None, dict(read_safetensors(config.model.path))
    if look_ahead:
        now, before = trained(config, look_ahead)
        older = make_target(config.model)
        older.load(before, 0)
    present.load(now, 0)
    targets = _targets(config, look_ahead > 0)
    for target in targets.values():
        target.load(now, 0)
    rows = []
    with working("bench rollout", len(batches), "batch sizes") as work:
        for batch in batches:
            contenders = _contenders(config, batch, targets, present)
            rows += _batch(place, config, batch, repeats, contenders, older)
            work.advance()
    _print(console, rows)
    if json_file:
        compiled = targets["plain"].llm.vllm_config.compilation_config
        facts = {
            "dtype": config.model.dtype,
            "vllm": vllm_version(),
            "arguments": config.engine.vllm,
            "compilation": f"{compiled.mode.name}, {compiled.backend}",
        }
        write_json(json_file, {"rows": rows, "look_ahead": look_ahead, **facts, **provenance()})


def _targets(config: Config, look_ahead: bool) -> dict[str, VllmTarget]:
    """Return one vLLM per drafter, because a vLLM cannot change its drafter after the start."""
    ahead = {"look-ahead": "adaptive"} if look_ahead else {}
    learned = {"eagle": "eagle"} if config.speculation.path else {}
    # n-gram last, because it loads numba, after which no other vLLM starts in this process
    kinds = {"plain": "off", **ahead, **learned, "n-gram": "suffix"}
    found = {}
    for name, drafter in kinds.items():
        speculation = config.speculation.model_copy(update={"drafter": drafter})
        target = open_target(config.model_copy(update={"speculation": speculation}), config.model.path)
        assert isinstance(target, VllmTarget), "the backend is vllm"
        found[name] = target
    return found


def _contenders(config: Config, batch: int, targets: dict[str, VllmTarget], present: Decoder) -> list[_VllmContender]:
    engine = config.engine.model_copy(update={"max_rows": batch})
    spell = load_detokenizer(config.model)
    adaptive = config.speculation.model_copy(update={"drafter": "adaptive"})
    found = [
        _VllmContender("tlt plain", Engine(present, engine, detokenize=spell)),
        _VllmContender("tlt adaptive", make_engine(engine, adaptive, present, spell, store=AheadStore()), True),
    ]
    for name, target in targets.items():
        ours = VllmEngine(target, engine, spell, store=AheadStore())
        found.append(_VllmContender(f"vllm {name}", ours, name == "look-ahead"))
    return found


def _batch(
    place: Workplace,
    config: Config,
    batch: int,
    repeats: int,
    contenders: Sequence[_VllmContender],
    older: Decoder | None,
) -> list[dict[str, Any]]:
    speeds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    stats = {contender.name: RolloutStats() for contender in contenders}
    differ = dict.fromkeys(speeds, 0)
    for repeat in range(repeats + 1):  # the first repeat is the warm-up
        count = max(2 * config.rollout.group_size, 2 * batch)
        requests = bench_requests(config, place.prompts, place.sampling, count, repeat)
        ahead = decode_ahead(older, config, requests) if older else []
        tokens: dict[int, list[int]] = {}
        for contender in contenders if repeat % 2 else [*contenders[:1], *contenders[:0:-1]]:
            if contender.looks_ahead:
                contender.engine.store.put(ahead)
            began = time.perf_counter()
            responses = list(contender.engine.generate(requests))
            seconds = time.perf_counter() - began
            tokens = tokens or {response.request.seed: response.token_ids for response in responses}
            if repeat:
                speeds[contender.name].append(contender.engine.stats.tokens / seconds)
                stats[contender.name] += contender.engine.stats
            differ[contender.name] += sum(tokens[r.request.seed] != r.token_ids for r in responses)
    for name, count in differ.items():
        assert count <= max(1, _MOST_FORKS * stats[name].tokens), f"{name}: {count} responses differ"
    return [
        {
            "batch": batch,
            "strategy": name,
            "tokens_per_second": statistics.median(found),
            "speeds": found,
            "accept_length": stats[name].accept_length,
            "accepted_of_drafted": stats[name].accepted / max(1, stats[name].drafted),
            "differ": differ[name],
            "to_vllm_plain": statistics.median(a / b for a, b in zip(found, speeds["vllm plain"], strict=True)),
            "threads": torch.get_num_threads(),
        }
        for name, found in speeds.items()
    ]


def _print(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    columns = ("rows", "engine", "tokens/s", "accept length", "acceptance rate", "times vLLM plain", "differ")
    table = Table(*columns, title="vLLM with our noise, the recipe's prompts (medians)")
    for row in rows:
        share = f"{row['accepted_of_drafted']:.0%}" if row["accept_length"] > 1 else ""
        numbers = (f"{row['tokens_per_second']:,.0f}", f"{row['accept_length']:.2f}", share)
        table.add_row(str(row["batch"]), row["strategy"], *numbers, f"{row['to_vllm_plain']:.2f}", str(row["differ"]))
    console.print(table)
