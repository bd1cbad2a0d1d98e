"""Tokens per second of each strategy and batch size on the recipe's prompts.

    python bench/rollout.py RECIPE [--batches 1 8 32] [--tail 64] [--only adaptive] [--json FILE] [--section.key value]

For vLLM see vllm_rounds.py. All strategies decode the same requests, and their tokens are
compared. They take turns of 0.1 seconds, so that other load on the machine slows all of them alike. For
look-ahead, the policy is trained for a few steps, and an earlier version of it decodes the drafts. Other engines are
compared with plain decoding on random prompts, without turns."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from older_target import decode_ahead, older_and_present
from other_engines import peers
from rich.console import Console
from rich.table import Table

from tlt.build import for_machine, load_detokenizer, open_workplace
from tlt.config import Config, ConfigError, load_config
from tlt.draft.ahead import Ahead, AheadStore
from tlt.draft.chains import Calibration
from tlt.draft.strategy import PLAIN
from tlt.engine.choice import strategies
from tlt.engine.drafters import make_drafters
from tlt.engine.engine import Engine
from tlt.engine.own_backend import make_tuner
from tlt.engine.tuner import Fixed, Tuner
from tlt.metrics import provenance, write_json
from tlt.models.decoder import Decoder
from tlt.progress import working
from tlt.sampling import request_seed
from tlt.spot.buffer import HarvestBuffer
from tlt.store.hub import from_hub
from tlt.types import Prompt, Request, RolloutStats, SamplingParams

_PEER_PROMPT, _PEER_TOKENS = 64, 128  # tokens of a prompt and of its response, in the comparison with other engines
# Relative half-width of the 95 % interval of adaptive at which the measurement ends. It has at least `repeats` and at
# most 2 * `repeats` repeats.
_HALF_WIDTH = 0.02
_TRIALS = 3  # measurements of each number of threads
_TURN = 0.1  # duration of a turn in seconds
_FORKS = {"float64": 0, "float32": 1, "bfloat16": math.inf}  # number of responses per repeat that rounding may change
_AHEAD = (8, 16, 32, 63)  # maximum numbers of look-ahead tokens in a draft


def bench_rollout(
    config: Config,
    batches: Sequence[int],
    tail: int,
    repeats: int,
    with_peers: bool,
    json_file: Path | None,
    look_ahead: int = 0,
    only: Sequence[str] = ("",),
) -> None:
    """Measure the tokens per second of each strategy and print a table.

    If `tail` is above 0, add a rollout of `tail` requests, all decoded in one batch until the last one ends.
    `look_ahead` is the number of policy updates between the target that decodes look-ahead drafts and the present
    target. 0 turns look-ahead off, and nothing is trained. `only` has prefixes of the names of the strategies to
    measure, in addition to plain decoding. If `with_peers`, also measure other engines that are installed."""
    console, config = Console(highlight=False), for_machine(from_hub(config))
    _, prompts, target, params = open_workplace(config)
    older: Decoder | None = None
    if look_ahead:
        with working("train for the look-ahead"):
            older, target = older_and_present(config, look_ahead)
    bench = _Bench(config, target, older, prompts, params, tuple(only))
    rows: list[dict[str, Any]] = []
    of_peers: list[dict[str, Any]] = []
    cases, peer_batches = bench.cases(batches, tail), batches if with_peers else ()
    with working("bench rollout", len(cases) + len(peer_batches), "cases") as work:
        for batch, label, requests in cases:
            rows += bench.rows(batch, label, requests, repeats)
            work.advance()
        torch.set_num_threads(bench.threads)
        for batch in peer_batches:
            work.note = f"batch {batch}: peers"
            of_peers += _compared_with_peers(config, target, batch, repeats)
            work.advance()
    _print(console, rows, of_peers)
    if json_file:
        facts = {
            "dtype": config.model.dtype,
            "drafter": config.speculation.path,
            "look_ahead": look_ahead,
            "learning_rate": config.train.learning_rate,
            **provenance(),
        }
        write_json(json_file, {"rows": rows, "peers": of_peers, **facts})


# -- strategies --------------------------------------------------------------------------------------------------------


@dataclass
class _Contender:
    """Fixed strategy or `adaptive`, with its measurements. Its calibration and its tuner are kept between repeats, as
    in a training run."""

    name: str
    tuner: Tuner
    harvest: bool = False
    looks_ahead: bool = False
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    speeds: list[float] = field(default_factory=list)
    stats: RolloutStats = field(default_factory=RolloutStats)

    @property
    def is_adaptive(self) -> bool:
        return not isinstance(self.tuner, Fixed)


class _Run:
    """Engine that decodes the requests of one repeat with one contender."""

    def __init__(self, contender: _Contender, engine: Engine, requests: Sequence[Request]) -> None:
        self.contender, self.engine = contender, engine
        self.seconds = 0.0
        self.tokens: dict[int, list[int]] = {}
        with self._timed():
            engine.start(requests)

    def turn(self) -> None:
        with self._timed() as began:
            while self.engine.busy and time.perf_counter() - began < _TURN:
                self.tokens |= {id(response.request): response.token_ids for response in self.engine.round()}

    @contextmanager
    def _timed(self) -> Iterator[float]:
        _synchronize(self.engine.target.device)
        began = time.perf_counter()
        yield began
        _synchronize(self.engine.target.device)
        self.seconds += time.perf_counter() - began


def bench_requests(
    config: Config, prompts: Sequence[Prompt], params: SamplingParams, count: int, repeat: int
) -> list[Request]:
    """Return the requests of one repeat. Each repeat decodes other responses to the same prompts."""
    G, seed = config.rollout.group_size, config.run.seed
    return [
        Request(prompt, i % G, repeat, request_seed(seed, "bench", prompt.prompt_id, repeat, i % G), params)
        for i in range(count)
        for prompt in [prompts[(i // G) % len(prompts)]]
    ]


@dataclass
class _Bench:
    config: Config
    target: Decoder
    older: Decoder | None
    """target that decodes look-ahead drafts; None turns look-ahead off"""
    prompts: Sequence[Prompt]
    params: SamplingParams
    only: tuple[str, ...] = ("",)
    threads: int = field(default_factory=torch.get_num_threads)

    def cases(self, batches: Sequence[int], tail: int) -> list[tuple[int, str, int]]:
        """Return (largest number of rows decoded at once, label, number of requests) of each measurement: one for each
        batch size, and one for a rollout of `tail` requests if `tail` is above 0."""
        G = self.config.rollout.group_size
        found = [(batch, f"batch {batch}", max(2 * G, 2 * batch)) for batch in batches]
        return found + ([(tail, f"rollout of {tail}", tail)] if tail else [])

    def contenders(self) -> list[_Contender]:
        speculation = self.config.speculation
        drafters, _ = make_drafters(speculation, self.target)
        found = [_Contender("plain", Fixed(PLAIN)), _Contender("plain, harvest", Fixed(PLAIN), harvest=True)]
        for drafter in drafters:
            for strategy in strategies([drafter.name])[1:]:
                found.append(_Contender(strategy.name, Fixed(strategy)))
        for width in _AHEAD if self.older else ():
            strategy = PLAIN._replace(ahead=width)
            found.append(_Contender(strategy.name, Fixed(strategy), looks_ahead=True))
        if speculation.drafter == "adaptive":
            for looks_ahead in (False, True) if self.older else (False,):
                name = "adaptive, look-ahead" if looks_ahead else "adaptive"
                found.append(_Contender(name, make_tuner(speculation, self.target, drafters), looks_ahead=looks_ahead))
        if odd := [only for only in self.only if not any(c.name.startswith(only) for c in found)]:
            names = ", ".join(c.name for c in found)
            raise ConfigError(f"--only {odd[0]}: no strategy begins with this; there are {names}")
        return [c for c in found if c.name == PLAIN.name or c.name.startswith(self.only)]

    def rows(self, batch: int, label: str, count: int, repeats: int) -> list[dict[str, Any]]:
        threads = self._best_threads(batch, count)
        contenders = self.contenders()
        for repeat in range(-1, 2 * repeats):  # the first repeat is the warm-up
            requests = bench_requests(self.config, self.prompts, self.params, count, max(0, repeat + 1))
            in_turn = contenders if repeat % 2 else contenders[::-1]
            ahead = decode_ahead(self.older, self.config, requests) if self.older else ()
            runs = self._decode(in_turn, batch, requests, timed=repeat >= 0, ahead=ahead)
            for run in runs:
                different = sum(run.tokens[key] != ids for key, ids in runs[0].tokens.items())
                assert different <= _FORKS[self.config.model.dtype], (
                    f"{run.contender.name}: {different} responses have other tokens than with {runs[0].contender.name}"
                )
            if repeat + 1 >= repeats and self._settled(contenders):
                break
        return [row | {"threads": threads} for row in self._report(batch, label, contenders)]

    def _best_threads(self, batch: int, count: int) -> int:
        """Set and return the number of threads for all contenders: 1 or all, whichever makes plain decoding faster. One
        thread may be faster than all for a small batch."""
        trials = {threads: _Contender("plain", Fixed(PLAIN)) for threads in {1, self.threads}}
        for _ in range(_TRIALS if len(trials) > 1 else 0):
            for threads, contender in trials.items():
                torch.set_num_threads(threads)
                self._decode(
                    [contender], batch, bench_requests(self.config, self.prompts, self.params, count, 0), timed=True
                )
        best = max(trials, key=lambda threads: statistics.median(trials[threads].speeds or [0.0]))
        torch.set_num_threads(best)
        return best

    def _decode(
        self,
        contenders: Sequence[_Contender],
        batch: int,
        requests: Sequence[Request],
        timed: bool,
        ahead: Sequence[Ahead] = (),
    ) -> list[_Run]:
        """Decode with all contenders in turns. The contender with the fewest tokens has the next turn. On a GPU they
        decode one after another, because the GPU's memory does not suffice for all at once. If `timed`, store the
        speed and the counters of each contender."""
        apart = self.target.device.type != "cpu"
        done: list[_Run] = []
        for group in [[contender] for contender in contenders] if apart else [contenders]:
            runs = [_Run(contender, self._engine(contender, batch, ahead), requests) for contender in group]
            with working(f"batch {batch}", len(group) * len(requests), "responses") as work:
                work.note = f"{len(group)} strategies in turn"
                while going := [run for run in runs if run.engine.busy]:
                    min(going, key=lambda run: run.engine.stats.tokens).turn()
                    work.done = sum(len(run.tokens) for run in runs)
            for run in runs:
                run.engine.cache.release()
            done += runs
        for run in done if timed else ():
            run.contender.speeds.append(run.engine.stats.tokens / run.seconds)
            run.contender.stats += run.engine.stats
        return done

    def _engine(self, contender: _Contender, batch: int, ahead: Sequence[Ahead]) -> Engine:
        drafters, layout = make_drafters(self.config.speculation, self.target)
        if all(strategy.drafter == PLAIN.drafter for strategy in contender.tuner.strategies):
            drafters, layout = [], layout if contender.harvest else None
        store = AheadStore()
        store.put(ahead if contender.looks_ahead else ())
        buffer = HarvestBuffer(self.config.speculation.training.buffer_tokens)
        engine = Engine(
            self.target,
            self.config.engine.model_copy(update={"max_rows": batch}),
            drafters,
            contender.tuner,
            detokenize=load_detokenizer(self.config.model),
            layout=layout,
            on_harvest=buffer.add if contender.harvest else None,
            store=store,
        )
        engine.drafters.calibrations |= contender.calibrations  # calibrations of earlier repeats
        contender.calibrations = engine.drafters.calibrations
        return engine

    def _settled(self, contenders: Sequence[_Contender]) -> bool:
        plain = contenders[0].speeds
        measured = [c for c in contenders if c.is_adaptive] or contenders[1:]
        intervals = [ratio(contender.speeds, plain) for contender in measured]
        return all((high - low) / 2 <= _HALF_WIDTH * middle for low, middle, high in intervals)

    def _report(self, batch: int, label: str, contenders: Sequence[_Contender]) -> list[dict[str, Any]]:
        fixed = [c for c in contenders if not c.is_adaptive and not c.harvest]
        best = max(fixed, key=lambda c: statistics.median(c.speeds))
        return [
            {
                "batch": batch,
                "case": label,
                "strategy": c.name,
                "tokens_per_second": statistics.median(c.speeds),
                "accept_length": c.stats.accept_length,
                "seen_ahead": c.stats.seen_ahead / max(1, c.stats.tokens),
                "accept_length_ahead": c.stats.ahead_committed / max(1, c.stats.ahead_passes),
                "repeats": len(c.speeds),
                "ratio_to_plain": ratio(c.speeds, contenders[0].speeds),
                "ratio_to_best": ratio(c.speeds, best.speeds),
                "best": best.name,
            }
            for c in contenders
        ]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the paired ratios `ours` / `theirs` with its 95 % bootstrap interval: (low, median,
    high)."""
    paired = np.array(ours) / np.array(theirs)
    draws = np.random.default_rng(0).integers(len(paired), size=(2000, len(paired)))
    low, high = np.percentile(np.median(paired[draws], axis=1), [2.5, 97.5])
    return float(low), float(np.median(paired)), float(high)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# -- peers -------------------------------------------------------------------------------------------------------------


def _compared_with_peers(config: Config, target: Decoder, batch: int, repeats: int) -> list[dict[str, Any]]:
    """Compare plain decoding with other engines: `batch` prompts of 64 tokens, 128 new tokens each, no early stop."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = target.options.vocab_size
    prompts = torch.randint(vocab_size, (batch, _PEER_PROMPT), generator=generator).tolist()
    params = SamplingParams(max_new_tokens=_PEER_TOKENS)
    requests = [Request(Prompt(i, "", tuple(p)), 0, 0, i, params) for i, p in enumerate(prompts)]
    engine = Engine(target, config.engine.model_copy(update={"max_rows": batch}))

    def ours() -> None:
        for _ in engine.generate(requests):
            pass

    contenders = {"tlt plain": ours, **peers(config.model, target.device, prompts, _PEER_TOKENS)}
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):  # the first repeat is the warm-up
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


def _print(console: Console, rows: Sequence[dict[str, Any]], of_peers: Sequence[dict[str, Any]]) -> None:
    columns = ("case", "strategy", "tokens/s", "accept length", "look-ahead", "times plain", "times the best")
    table = Table(*columns, title="rollout, the recipe's prompts (median of paired ratios, 95 % interval)")
    for row in rows:
        seen_ahead = f"{row['seen_ahead']:.0%}, {row['accept_length_ahead']:.1f} a pass" if row["seen_ahead"] else ""
        numbers = (f"{row['tokens_per_second']:,.0f}", f"{row['accept_length']:.2f}", seen_ahead)
        ratios = ("{1:.2f} ({0:.2f}-{2:.2f})".format(*row[key]) for key in ("ratio_to_plain", "ratio_to_best"))
        table.add_row(row["case"], row["strategy"], *numbers, *ratios)
    console.print(table)
    if of_peers:
        title = f"plain decoding, {_PEER_PROMPT} + {_PEER_TOKENS} tokens"
        table = Table("batch", "engine", "tokens/s", "tlt plain tokens/s", "tlt / engine", title=title)
        for row in of_peers:
            numbers = (f"{row[key]:,.0f}" for key in ("tokens_per_second", "tlt_tokens_per_second"))
            table.add_row(str(row["batch"]), row["name"], *numbers, f"{row['tlt_ratio']:.2f}")
        console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="TOML file, such as recipes/longtail.toml")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="numbers of concurrent requests")
    parser.add_argument("--tail", type=int, default=0, help="also measure one rollout of this many requests")
    parser.add_argument("--repeats", type=int, default=3, help="measurements, of which the median is reported")
    parser.add_argument(
        "--look-ahead",
        type=int,
        default=1,
        metavar="STEPS",
        help="policy updates between the look-ahead drafts and the measured decoding (default 1); 0: no look-ahead",
    )
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of the names of the strategies to measure")
    parser.add_argument("--peers", choices=["auto", "none"], default="auto", help="also measure the installed engines")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    asked, overrides = parser.parse_known_args(argv)
    if min(*asked.batches, asked.repeats) < 1:
        parser.error("--batches and --repeats must be at least 1")
    try:
        config = load_config(asked.recipe, overrides)
        if config.engine.backend == "vllm":
            raise ValueError("bench/rollout.py measures tlt's own engine: for vLLM run bench/vllm_rounds.py")
        options = (asked.tail, asked.repeats, asked.peers == "auto", asked.json, asked.look_ahead, asked.only)
        bench_rollout(config, asked.batches, *options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
