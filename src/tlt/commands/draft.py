"""`tlt draft train`: train a learned drafter from prompts alone, and evaluate it.

The target answers the recipe's prompts, and its hidden states are saved. The drafter is trained on them."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count
from operator import mul
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from tlt.build import load_detokenizer, open_workplace
from tlt.config import Config, ConfigError
from tlt.draft.eagle import EagleLayer, eagle_options, load_drafter, save_drafter
from tlt.draft.features import Harvest
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.drafters import make_drafters
from tlt.engine.engine import Engine
from tlt.engine.memory import free_bytes
from tlt.engine.own_backend import make_tuner
from tlt.engine.tuner import Fixed
from tlt.files import refuse_to_overwrite, share
from tlt.metrics import provenance, write_json
from tlt.models.decoder import Decoder
from tlt.progress import console, working
from tlt.sampling import make_requests
from tlt.spot.buffer import HarvestBuffer, pieces
from tlt.spot.trainer import DrafterTrainer
from tlt.spot.unroll import packs
from tlt.stopping import SignalRecord, Stopped, handled
from tlt.store.hub import from_hub
from tlt.types import Request
from tlt.wording import counted

_HELD_OUT = 16  # number of prompts for the final evaluation; each is answered once
_HELD_BACK = 5  # one in five of the other prompts is for validation, which selects the weights
_EVALUATING, _JUDGING = 0.1, 0.2  # seconds of validation, and of the final evaluation, per second of training
_ALONE = 120.0  # seconds of the evaluation of a drafter without training
_EVALUATED = 2048  # number of tokens that a validation uses
_LEAST_ROUNDS = 8  # minimum number of rounds of a final evaluation, even if they exceed its time
_JUDGED = Strategy("eagle", 6)  # strategy of the final evaluation


@dataclass
class Workbench:
    """Target model of a recipe, and requests for its training prompts and its held-out prompts."""

    config: Config
    target: Decoder
    train: list[Request]
    held_out: list[Request]

    @classmethod
    def of(cls, config: Config) -> Workbench:
        _, prompts, target, params = open_workplace(config)
        if len(prompts) <= _HELD_OUT:
            raise ConfigError(
                f"too few prompts ({len(prompts)}): {_HELD_OUT} are held out, so give more than {_HELD_OUT}"
            )
        size = config.rollout.group_size
        random.Random(config.run.seed).shuffle(prompts)
        held_out, train = (
            make_requests(part, size, params, config.run.seed, "draft")
            for part in (prompts[:_HELD_OUT], prompts[_HELD_OUT:])
        )
        in_order = sorted(train, key=lambda request: request.index)  # first one response to each prompt
        return cls(config, target, in_order, [request for request in held_out if request.index == 0])


def train_drafter(config: Config, folder: Path, harvest_tokens: int, seconds: float) -> None:
    """Train a drafter and write it to `folder`: weights, config, and training.json, which records the training and its
    results.

    The recipe's model answers its prompts until the hidden states of `harvest_tokens` tokens are saved, or until all
    prompts are answered. The drafter is trained on them for `seconds`. Ctrl-C or SIGTERM ends the training early, keeps
    the drafter and raises Stopped. If the signal arrives while the model still answers prompts, nothing is kept. Raises
    ValueError if the folder is not empty, and ConfigError, DataError, ModelError or HubError."""
    refuse_to_overwrite(folder)
    bench = Workbench.of(from_hub(config))
    torch.manual_seed(config.run.seed)
    layer = EagleLayer(eagle_options(bench.target.options, config.speculation.kind, config.speculation.window))
    began, signals = time.perf_counter(), SignalRecord()
    with handled(signals.receive_signal):
        buffer = harvest(bench, layer, harvest_tokens, lambda: bool(signals))
    if signals:
        raise Stopped(
            f"{signals.name} ended the collection of training data: the drafter was not trained and nothing was kept",
            signals.number,
        )
    harvested = time.perf_counter() - began
    if buffer.tokens < harvest_tokens:
        short = f"{buffer.tokens:,} of {harvest_tokens:,} tokens collected, because all prompts are answered"
        console().print(f"{short}: for more, give more prompts or raise rollout.group_size", soft_wrap=True)
    trainer = DrafterTrainer(layer, bench.target, config.speculation.training, config.run.seed)
    held = {*sorted({item.prompt_id for item in buffer.items})[::_HELD_BACK]}
    taught = [item for item in buffer.items if item.prompt_id not in held]
    if not taught:
        raise ConfigError(f"too few tokens of training data ({buffer.tokens}): raise --tokens, or give more prompts")
    held_back = [item for item in buffer.items if item.prompt_id in held]
    with handled(signals.receive_signal):
        curve = fit(trainer, taught, held_back, seconds, lambda: bool(signals))
    facts = {
        "harvest_tokens": buffer.tokens,
        "harvest_seconds": harvested,
        "train_seconds": curve.points[-1]["seconds"],
        "steps": int(trainer.steps),
        "curve": curve.points,
        "config": config.speculation.model_dump(include={"kind", "window", "training"}),
    }
    layer.acceptance_rate = curve.acceptance_rate
    _save(layer, folder, facts | {"held_out": []})  # saved now, because the final evaluation may be interrupted
    kept = f"the drafter is in {folder}, without a final evaluation"
    if signals:
        raise Stopped(f"{signals.name} ended the training early: {kept}", signals.number)
    try:
        result = judge(bench, layer, _JUDGING * seconds)
    except KeyboardInterrupt as stop:
        stop.add_note(kept)
        raise
    layer.acceptance_rate = result["acceptance_rate"][0]
    _save(layer, folder, facts | {"held_out": [result]})
    _print(result)
    console().print(f"acceptance rate of the first draft token in validation: {curve.acceptance_rate:.0%}")
    use = f"--speculation.drafter adaptive --speculation.path {folder}"
    console().print(f"the drafter is in {folder}: use it with {use}")


def _save(layer: EagleLayer, folder: Path, facts: dict[str, Any]) -> None:
    """Write the drafter and training.json."""
    save_drafter(layer, folder)
    write_json(folder / "training.json", facts | provenance())
    share(folder)


def harvest(
    bench: Workbench, layer: EagleLayer, tokens: int, stop: Callable[[], bool] = lambda: False
) -> HarvestBuffer:
    """Decode the training prompts and return the hidden states as training data. `layer` sets which hidden states are
    saved. Decoding ends when `tokens` tokens are saved, when all prompts are answered, or when `stop` returns True.
    Raises ConfigError if the host has too little memory."""
    _refuse_full_memory(bench, layer, tokens)
    buffer = HarvestBuffer(tokens + layer.options.window)  # room for the last item, of at most a window
    changes = {"drafter": "adaptive", "path": None, "look_ahead": 0}
    speculation = bench.config.speculation.model_copy(update=changes)
    drafters, _ = make_drafters(speculation, bench.target)
    tuner = make_tuner(speculation, bench.target, drafters)
    layout = layer.options.layout
    spell = load_detokenizer(bench.config.model)
    engine = Engine(
        bench.target, bench.config.engine, drafters, tuner, detokenize=spell, layout=layout, on_harvest=buffer.add
    )
    engine.start(bench.train)
    with working("collect training data", tokens, "tokens") as work:
        while engine.busy and buffer.tokens < tokens and not stop():
            engine.round()
            work.update(buffer.tokens, f"{engine.stats.tokens:,} decoded")
    return buffer


def _refuse_full_memory(bench: Workbench, layer: EagleLayer, tokens: int) -> None:
    """Raise ConfigError if the hidden states of `tokens` tokens do not fit the free memory of the host."""
    longest = sum(len(request.prompt.token_ids) + request.sampling.max_new_tokens for request in bench.train)
    size = bench.target.dtype.itemsize * layer.options.layout.width(layer.options.hidden_size)
    most = min(tokens, longest)
    needed, free = most * size, free_bytes(torch.device("cpu"))
    if needed > free:
        raise ConfigError(
            f"the hidden states of up to {most:,} tokens need {needed / 2**30:.2f} GiB of memory, and "
            f"{free / 2**30:.2f} GiB are free: lower --tokens"
        )


# -- training ----------------------------------------------------------------------------------------------------------


class Curve:
    """Learning curve of a drafter: acceptance rates on validation prompts."""

    def __init__(self, trainer: DrafterTrainer, held_back: Sequence[Harvest]) -> None:
        self.trainer = trainer
        drawn = pieces(held_back, _EVALUATED, _EVALUATED // 4, random.Random(0))
        most, device = trainer.config.micro_batch_tokens, trainer.target.device
        self.held_back = list(packs(drawn, most, device, random.Random(0)))
        self.seconds = self.longest = 0.0
        """duration in seconds of all evaluations so far (`seconds`), and of the longest one (`longest`)"""
        self.points: list[dict[str, Any]] = []
        """One entry per evaluation: seconds of training, and accept length of a chain and acceptance rate by depth in
        validation (`held_back`)"""
        self.best = {name: tensor.clone() for name, tensor in trainer.layer.state_dict().items()}
        self.accept_length = self.acceptance_rate = 0.0
        """accept length of a chain (`accept_length`) and acceptance rate of its first draft token (`acceptance_rate`),
        both measured with the weights `best` in validation"""

    def evaluate(self, spent: float) -> None:
        """Evaluate the drafter after `spent` seconds. Keep its weights if they are the best so far on validation
        prompts."""
        began, layer = time.perf_counter(), self.trainer.layer
        held_back = self.trainer.acceptance(self.held_back)
        accepted = 1 + sum(accumulate(held_back, mul))
        if accepted > self.accept_length:
            self.accept_length, self.acceptance_rate = accepted, held_back[0]
            self.best = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        self.points.append({"seconds": spent, "accept_length": accepted, "held_back": held_back})
        took = time.perf_counter() - began
        self.seconds, self.longest = self.seconds + took, max(self.longest, took)


def fit(
    trainer: DrafterTrainer,
    taught: Sequence[Harvest],
    held_back: Sequence[Harvest],
    seconds: float,
    stop: Callable[[], bool] = lambda: False,
) -> Curve:
    """Train the drafter on `taught` for `seconds`, including evaluations, or until `stop` returns True. The learning
    rate falls linearly to a tenth. At the end the drafter has the weights that were best on `held_back`, the validation
    data. Return the learning curve."""
    began = time.perf_counter()
    trainer.prepare(taught, from_scratch=True)
    curve = Curve(trainer, held_back)
    with working("train the drafter", seconds) as work:
        for _ in chain.from_iterable(trainer.epoch(taught) for _ in count()):
            spent = time.perf_counter() - began
            work.update(spent, counted(int(trainer.steps), "step"))
            left = seconds - spent
            ends = left <= curve.longest or stop()
            is_due = curve.seconds <= _EVALUATING * spent and left > 2 * curve.longest
            if ends or is_due:
                curve.evaluate(spent)
            if ends:
                break
            trainer.rate_scale = 1 - 0.9 * spent / seconds
    trainer.layer.load_state_dict(curve.best)
    return curve


# -- evaluation --------------------------------------------------------------------------------------------------------


def judge(bench: Workbench, layer: EagleLayer, seconds: float) -> dict[str, Any]:
    """Decode the held-out prompts with plain decoding and with the drafter, in about `seconds` altogether. Return the
    result of the drafter, with its speed relative to plain decoding."""
    plain, result = (evaluate(bench, layer, strategy, seconds / 2) for strategy in (PLAIN, _JUDGED))
    return result | {"times_plain": result["tokens_per_second"] / plain["tokens_per_second"]}


def evaluate(bench: Workbench, layer: EagleLayer, strategy: Strategy, seconds: float = math.inf) -> dict[str, Any]:
    """Decode the held-out prompts with this strategy for up to `seconds`, but at least 8 rounds. Return accept length,
    half of its 95 % interval (`interval`), acceptance rate by depth, and speed. The strategy should have min_chance 0,
    because unlikely draft tokens are then measured too."""
    drafter = EagleDrafter(layer, bench.target)
    spell, layout = load_detokenizer(bench.config.model), layer.options.layout
    engine = Engine(bench.target, bench.config.engine, [drafter], Fixed(strategy), detokenize=spell, layout=layout)
    engine.start(bench.held_out)
    began, stats, lengths = time.perf_counter(), engine.stats, list[float]()
    with working(f"decode held-out prompts, {strategy.name}", len(bench.held_out), "responses") as work:
        while engine.busy and (time.perf_counter() - began < seconds or len(lengths) < _LEAST_ROUNDS):
            tokens, passes = stats.tokens, stats.row_passes
            work.advance(len(engine.round()))
            lengths.append((stats.tokens - tokens) / max(1, stats.row_passes - passes))
    spent, calibration = time.perf_counter() - began, engine.drafters.calibrations[drafter.name]
    return {
        "strategy": strategy.name,
        "accept_length": stats.accept_length,
        "interval": 1.96 * statistics.pstdev(lengths) / len(lengths) ** 0.5,
        "acceptance_rate": calibration.acceptance_rates(strategy.depth),
        "tokens_per_second": stats.tokens / spent,
        "tokens": stats.tokens,
    }


def eval_drafter(config: Config) -> None:
    """Evaluate the drafter in speculation.path, which must be set, on held-out prompts."""
    assert config.speculation.path
    bench = Workbench.of(from_hub(config))
    _print(judge(bench, load_drafter(config.speculation.path, bench.target.options), _ALONE))


def _print(result: dict[str, Any]) -> None:
    """Print the result in 80 columns."""
    rates = [f"{rate:.2f}" if rate is not None else "-" for rate in result["acceptance_rate"]]
    table = Table(title=f"held-out prompts, {result['tokens']:,} tokens", box=None, pad_edge=False, title_style="")
    table.add_column("strategy", no_wrap=True)
    for column in ("accept\nlength", "times\nplain", *(str(d + 1) for d in range(len(rates)))):
        table.add_column(column, justify="right", min_width=5)
    length = f"{result['accept_length']:.2f} ±{result['interval']:.2f}"
    table.add_row(result["strategy"], length, f"{result['times_plain']:.2f}", *rates)
    console().print(table)
    console().print(
        "accept length: tokens committed per target pass, including the target's own, ± half of the 95 % interval; "
        "times plain: tokens per second divided by those of plain decoding on this machine; 1, 2, ...: acceptance rate "
        "at this depth if the tokens before it were accepted. Strategy: depth d, least chance of a draft token p.",
        style="dim",
    )
