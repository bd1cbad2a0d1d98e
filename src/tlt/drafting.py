"""`tlt draft train` and `tlt draft eval`: a learned drafter from prompts alone, and what it is worth.

Harvest, then train: the target answers the recipe's prompts, and the drafter learns from what that computed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tlt.build import open_workplace
from tlt.config import Config, ConfigError
from tlt.draft.buffer import Harvest, HarvestBuffer
from tlt.draft.eagle import EagleLayer, eagle_options, load_drafter, save_drafter
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.draft.trainer import DrafterTrainer
from tlt.draft.unroll import packs
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.files import refuse_to_overwrite, share
from tlt.metrics import provenance, write_json
from tlt.models.decoder import Decoder
from tlt.sampling import make_requests
from tlt.types import Request

_HELD_OUT = 16  # prompts that no drafter is trained on
_HELD_BACK = 5  # one of so many of the others is not either: its harvest tells how far training has come
_LOOKS = 40  # at the held-back harvest while a drafter is trained
_LOOK_TOKENS = 8192  # entries of it that are looked at
_HARVEST_WITH = Strategy("suffix", 6, 1, 7, 0.6)
_CHAIN, _TREE = Strategy("eagle", 6, 1, 7), Strategy("eagle", 6, 2, 13)


@dataclass
class Workbench:
    """The target of a recipe and requests for its prompts: those to train on, and those held out."""

    config: Config
    target: Decoder
    train: list[Request]
    held_out: list[Request]

    @classmethod
    def of(cls, config: Config) -> Workbench:
        _, prompts, target, params = open_workplace(config)
        if len(prompts) <= _HELD_OUT:
            raise ConfigError(f"{len(prompts)} prompts are too few: {_HELD_OUT} are held out, so give more")
        size = config.rollout.group_size
        requests = [make_requests([prompt], size, params, config.run.seed, "draft") for prompt in prompts]
        random.Random(config.run.seed).shuffle(requests)
        flat = [
            [request for group in part for request in group] for part in (requests[_HELD_OUT:], requests[:_HELD_OUT])
        ]
        return cls(config, target, *flat)


def train_drafter(config: Config, folder: Path, harvest_tokens: int, seconds: float) -> None:
    """Write a drafter's folder: weights, config, and training.json with how it was made. The recipe's model answers its
    prompts until it has harvested so many tokens, and the drafter is trained on these for so many seconds. Raises
    ValueError where the folder holds anything, ConfigError, DataError or ModelError."""
    refuse_to_overwrite(folder)
    console = Console(highlight=False, markup=False, emoji=False)
    bench = Workbench.of(config)
    torch.manual_seed(config.run.seed)
    layer = EagleLayer(eagle_options(bench.target.options, config.speculation.kind, config.speculation.window))
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        began = time.perf_counter()
        buffer = harvest(bench, layer, harvest_tokens, progress)
        harvested = time.perf_counter() - began
        trainer = DrafterTrainer(layer, bench.target, config.speculation.training, config.run.seed)
        held = {*sorted({item.prompt_id for item in buffer.items})[::_HELD_BACK]}
        taught = [item for item in buffer.items if item.prompt_id not in held]
        if not taught:
            raise ConfigError(f"{buffer.tokens} tokens of harvest leave none to train on: give more of them")
        trainer.prepare(taught, from_scratch=True)
        curve = HeldBackCurve([item for item in buffer.items if item.prompt_id in held], seconds)
        overlaps = _train(trainer, taught, curve, seconds, progress)
    results = judge(bench, layer)
    layer.agreement = results[0]["agreement"][0]
    save_drafter(layer, folder)
    facts = {
        "harvest_tokens": buffer.tokens,
        "harvest_seconds": harvested,
        "train_seconds": seconds,
        "steps": int(trainer.steps),
        "overlap": overlaps,
        "curve": curve.points,
        "config": config.speculation.model_dump(include={"kind", "window", "training"}),
    }
    write_json(folder / "training.json", {**facts, "held_out": results, **provenance()})
    share(folder)
    _print(console, results)
    if len(curve.points) > 1:
        middle, end = (curve.points[n]["accept_length"] for n in (len(curve.points) // 2, -1))
        console.print(
            f"on harvest that is held back a chain committed {middle:.2f} tokens after half of the training, "
            f"{end:.2f} at its end"
        )
    console.print(f"the drafter is in {folder}: --speculation.drafter adaptive --speculation.path {folder}")


def harvest(bench: Workbench, layer: EagleLayer, tokens: int, progress: Progress) -> HarvestBuffer:
    buffer = HarvestBuffer(min(tokens, bench.config.speculation.training.buffer_tokens))
    drafter = SuffixDrafter(bench.config.speculation.history_tokens)
    layout = layer.options.layout
    engine = Engine(
        bench.target, bench.config.engine, [drafter], Fixed(_HARVEST_WITH), layout=layout, on_harvest=buffer.add
    )
    task = progress.add_task("harvest", total=tokens, note="")
    engine.start(bench.train)
    while engine.busy and buffer.tokens < buffer.max_tokens:
        engine.round()
        progress.update(task, completed=buffer.tokens, note=f"{buffer.tokens:,} tokens")
    progress.update(task, completed=tokens)
    return buffer


class HeldBackCurve:
    """What the drafter is worth on harvest of prompts that it is not trained on, while it is trained: whether training
    for longer would have paid."""

    def __init__(self, held_back: Sequence[Harvest], seconds: float) -> None:
        self.held_back, self.every = held_back, seconds / _LOOKS
        self.looks = 0
        self.points: list[dict[str, float]] = []
        """seconds of training, and the accept length of a chain of `unroll` guesses by laws (1 - TV)"""
        self.took = 0.0
        """seconds, which are not of training"""

    def look(self, trainer: DrafterTrainer, spent: float) -> None:
        """Where one is due."""
        if spent < self.looks * self.every:
            return
        self.looks += 1
        began, config = time.perf_counter(), trainer.config
        sample = list(packs(self.held_back, config.micro_batch_tokens, trainer.target.device, random.Random(0)))
        sums = [trainer.judge([trainer.layer], batch) for batch in sample[: _LOOK_TOKENS // config.micro_batch_tokens]]
        if entries := sum(count for _, count in sums):
            accepted = entries / sum(rounds for [(rounds, _)], _ in sums)
            self.points.append({"seconds": spent, "accept_length": accepted})
        self.took += time.perf_counter() - began


def _train(
    trainer: DrafterTrainer, taught: Sequence[Harvest], curve: HeldBackCurve, seconds: float, progress: Progress
) -> list[float]:
    """For that long, the learning rate falling to a tenth; returns the last steps' mean overlap by guess."""
    task = progress.add_task("train", total=seconds, note="")
    recent: list[list[float]] = []
    began = time.perf_counter()
    while True:
        for overlaps in trainer.epoch(taught):
            spent = time.perf_counter() - began - curve.took
            recent = [*recent[-49:], overlaps]
            means = [sum(column) / len(column) for column in zip(*recent, strict=False)]  # that all of them had
            progress.update(task, completed=min(spent, seconds), note=f"agreement of laws {means[0]:.3f}")
            curve.look(trainer, min(spent, seconds))
            if spent >= seconds:
                return means
            trainer.rate_scale = 1 - 0.9 * spent / seconds


def judge(bench: Workbench, layer: EagleLayer) -> list[dict[str, Any]]:
    """A chain and a tree, each against plain decoding of the same tokens."""
    plain = evaluate(bench, layer, PLAIN)["tokens_per_second"]
    found = [evaluate(bench, layer, strategy) for strategy in (_CHAIN, _TREE)]
    return [result | {"times_plain": result["tokens_per_second"] / plain} for result in found]


def evaluate(bench: Workbench, layer: EagleLayer, strategy: Strategy) -> dict[str, Any]:
    """Accept length and agreement by depth on the held-out prompts; nothing is cut, so all depths are seen."""
    drafter = EagleDrafter(layer, bench.target)
    engine = Engine(bench.target, bench.config.engine, [drafter], Fixed(strategy), layout=layer.options.layout)
    began = time.perf_counter()
    for _ in engine.generate(bench.held_out):
        pass
    seconds = time.perf_counter() - began
    return {
        "strategy": strategy.name,
        "accept_length": engine.stats.accept_length,
        "agreement": engine.drafters.calibrations[drafter.name].agreement(strategy.depth, strategy.branching),
        "tokens_per_second": engine.stats.tokens / seconds,
        "tokens": engine.stats.tokens,
    }


def eval_drafter(config: Config, json_file: Path | None) -> None:
    if config.speculation.path is None:
        raise ConfigError("tlt draft eval needs a drafter: give --speculation.path FOLDER")
    bench = Workbench.of(config)
    layer = load_drafter(config.speculation.path, bench.target.options)
    results = judge(bench, layer)
    _print(Console(highlight=False, markup=False, emoji=False), results)
    if json_file:
        write_json(json_file, {"held_out": results, "options": asdict(layer.options), **provenance()})


def _print(console: Console, results: Sequence[dict[str, Any]]) -> None:
    """In 80 columns."""
    depth = max(len(result["agreement"]) for result in results)
    table = Table(title=f"held-out prompts, {results[0]['tokens']:,} tokens", box=None, pad_edge=False, title_style="")
    table.add_column("strategy", no_wrap=True)
    for column in ("accept\nlength", "times\nplain", *(str(d + 1) for d in range(depth))):
        table.add_column(column, justify="right", min_width=5)
    for result in results:
        agreement = (f"{a:.2f}" if a is not None else "-" for a in result["agreement"])
        numbers = (f"{result['accept_length']:.2f}", f"{result['times_plain']:.2f}")
        table.add_row(result["strategy"], *numbers, *agreement)
    console.print(table)
    console.print(
        "accept length: tokens a target pass commits, its own counted; times plain: tokens per second against plain "
        "decoding of the same tokens on this machine; 1, 2, ...: how often a guess so deep is right if those before it "
        "were. Strategies: depth d, branching b, nodes verified n.",
        style="dim",
    )
