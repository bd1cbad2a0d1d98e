"""Compares learned drafters: shapes and unroll lengths, each trained for the same time on the same harvest. It
also compares drafts of the same length with shared noise and without.

Time is CPU time of one thread, so that it does not depend on what else the machine does.

    OMP_NUM_THREADS=1 python bench/drafters.py recipes/longtail.toml [--seconds 40 120] [--tokens 60000] [--only NAME]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tlt.commands.drafting import Workbench, evaluate, harvest
from tlt.config import Config, load_config
from tlt.draft.chains import Draft
from tlt.draft.eagle import EagleLayer, Kind, eagle_options, load_drafter
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import Strategy
from tlt.engine.engine import Engine
from tlt.engine.noise import DraftNoise
from tlt.engine.state import Round
from tlt.engine.tuner import Fixed
from tlt.metrics import provenance, write_json
from tlt.progress import shown
from tlt.spot.trainer import DrafterTrainer

DRAFTED = Strategy("eagle", 6)
PACK = 512  # tokens of a micro-batch; a recipe may have smaller ones, so that workers come back sooner
Variant = tuple[Kind, dict[str, Any]]
VARIANTS: dict[str, Variant] = {
    "eagle1, unroll 7": ("eagle1", {}),
    "eagle1, unroll 3": ("eagle1", {"unroll": 3}),
    "eagle1, unroll 1": ("eagle1", {"unroll": 1}),
    "eagle3, unroll 7": ("eagle3", {}),
    "eagle3, unroll 3": ("eagle3", {"unroll": 3}),
    "eagle3, unroll 1": ("eagle3", {"unroll": 1}),
}
"""name -> kind of drafter, and its training; `unroll` is the largest number of trained draft tokens of a chain"""


class WithoutNoise(Engine):
    """Drafts without shared noise, as other engines do: it takes the drafter's likeliest tokens."""

    def draft(self, now: Round) -> list[Draft]:
        with patch("tlt.engine.drafting.DraftNoise", _NoNoise):
            return super().draft(now)


class _NoNoise(DraftNoise):
    def __call__(self, depth: int, ids: Tensor | None) -> Tensor:
        return torch.zeros_like(super().__call__(depth, ids))


def train(bench: Workbench, items: list[Any], change: Variant, seconds: float) -> tuple[EagleLayer, int]:
    speculation, (kind, training) = bench.config.speculation, change
    config = speculation.training.model_copy(update={"micro_batch_tokens": PACK} | training)
    torch.manual_seed(0)
    layer = EagleLayer(eagle_options(bench.target.options, kind, speculation.window))
    if kind == "eagle1":  # eagle1 reads the last hidden state alone
        items = [item._replace(features=item.features[:, -layer.options.hidden_size :]) for item in items]
    trainer, start = DrafterTrainer(layer, bench.target, config), time.process_time()
    trainer.prepare(items, from_scratch=True)
    while True:
        for _ in trainer.epoch(items):
            spent = time.process_time() - start
            if spent >= seconds:
                return layer, int(trainer.steps)
            trainer.rate_scale = 1 - 0.9 * spent / seconds


def judge(bench: Workbench, layer: EagleLayer) -> dict[str, Any]:
    start = time.process_time()
    result = evaluate(bench, layer, DRAFTED)
    return result | {"tokens_per_second": result["tokens"] / (time.process_time() - start)}


def accept_length(bench: Workbench, engine: type[Engine], layer: EagleLayer, heat: float) -> float:
    requests = [replace(r, sampling=replace(r.sampling, temperature=heat)) for r in bench.held_out]
    drafter, layout = EagleDrafter(layer, bench.target), layer.options.layout
    decoder = engine(bench.target, bench.config.engine, [drafter], Fixed(DRAFTED), layout=layout)
    for _ in decoder.generate(requests):
        pass
    return decoder.stats.accept_length


def shared_noise(bench: Workbench, config: Config) -> list[dict[str, Any]]:
    assert config.speculation.path is not None, "the recipe names a drafter"
    layer, rows = load_drafter(config.speculation.path, bench.target.options), []
    for heat in (1.0, 0.6):
        with_noise, without = (accept_length(bench, engine, layer, heat) for engine in (Engine, WithoutNoise))
        rows.append({"temperature": heat, "strategy": DRAFTED.name, "shared_noise": with_noise, "without": without})
        print(f"temperature {heat}: accept length {with_noise:.2f} with shared noise, {without:.2f} without")
    return rows


def keep(file: Path | None, rows: list[dict[str, Any]], noise: list[dict[str, Any]]) -> None:
    if file:
        write_json(file, {"drafters": rows, "shared_noise": noise, **provenance()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seconds", type=float, nargs="+", default=[40, 120])
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--only", default="", help="variants whose name holds this, of which 'shared noise' is one")
    parser.add_argument("--json", type=Path, help="rows of earlier runs in it stay")
    arguments = parser.parse_args()
    config = load_config(arguments.recipe)
    bench = Workbench.of(config)
    found = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.is_file() else {}
    noise = shared_noise(bench, config) if arguments.only in "shared noise" else found.get("shared_noise", [])
    rows = found.get("drafters", [])
    keep(arguments.json, rows, noise)
    widest = EagleLayer(eagle_options(bench.target.options, "eagle3", config.speculation.window))
    with shown():
        items = list(harvest(bench, widest, arguments.tokens).items)
    for seconds, (name, change) in itertools.product(arguments.seconds, VARIANTS.items()):
        if arguments.only not in name:
            continue
        layer, steps = train(bench, items, change, seconds)
        result = judge(bench, layer)
        rows = [row for row in rows if (row["variant"], row["seconds"]) != (name, seconds)]
        rows.append({"variant": name, "seconds": seconds, "steps": steps, "held_out": result})
        speed = f"accept length {result['accept_length']:.2f} ({result['tokens_per_second']:,.0f} tokens/s)"
        print(f"{name}, {seconds:g} s: {steps} steps, {speed}", flush=True)
        keep(arguments.json, rows, noise)


if __name__ == "__main__":
    main()
