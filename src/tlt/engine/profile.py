"""Start-up profile: seconds of a round by number of active rows and strategy, computed from a few timed passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import torch

from tlt.attention.key_counts import rounded_up
from tlt.config import EngineConfig
from tlt.draft.chains import Draft
from tlt.draft.drafter import Drafter
from tlt.draft.features import FeatureLayout
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.engine import Engine
from tlt.engine.estimates import interpolate
from tlt.engine.runner import most_new
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.types import Prompt, Request, SamplingParams

_SECONDS = 1.0  # time limit of all timed calls; the rounds of the rollout refine the result
_REPEATS = 5
_ROWS = 16
_NEW = (1, 2, 3, 5, 9, 17, 33)  # numbers of new tokens per row in the timed passes
_DEPTHS = (1, 3)  # depths of the timed drafts; the first draft token costs more than the others
_TOKENS = 8  # maximum number of tokens of the prompt, and of the response


def profile(
    target: Decoder,
    config: EngineConfig,
    drafters: Sequence[Drafter],
    strategies: Sequence[Strategy],
    layout: FeatureLayout | None,
) -> dict[int, dict[Strategy, float]]:
    """Return rows -> strategy -> seconds of a round. The drafters cannot be used afterwards, so pass new ones.

    The profile assumes that the seconds of a pass over B rows of N tokens depend only on B x N. So only passes over one
    row and over up to 16 rows are timed. The times of all other passes are computed from the timed ones.
    """
    names = sorted({s.drafter for s in strategies} - {PLAIN.drafter})
    length = max(1, min(_TOKENS, target.options.max_positions // 2))  # tokens of the prompt, and of the response
    deepest = target.options.max_positions - length  # a draft must not go beyond the positions of a short model
    passes: dict[int, float] = {}
    drafts: dict[tuple[str, int], dict[int, float]] = {}
    for count, seconds in {1: _SECONDS / 3, min(_ROWS, config.max_rows): _SECONDS * 2 / 3}.items():
        engine = _engine(target, config, drafters, layout, count, length)
        live = len(engine.rows)  # fewer rows if the cache is small
        new = [n for n in _NEW if n <= min(deepest, most_new(live, target.options.vocab_size))]
        calls: dict[Hashable, tuple[int, Callable[[], object]]] = {
            (name, depth): (0, partial(_draft, engine, name, min(depth, deepest)))
            for name in names
            for depth in _DEPTHS
        }
        calls |= {n: (n * live, partial(_verify, engine, n)) for n in new}
        for name in names:  # a first draft may prepare what later ones use
            _draft(engine, name, 1)
        for call, least in _least_seconds(calls, seconds, target.device).items():
            if isinstance(call, int):
                passes[call * live] = least
            elif isinstance(call, tuple):
                drafts.setdefault(call, {})[live] = least
    counts = sorted({min(2**power, config.max_rows) for power in range(config.max_rows.bit_length() + 1)})
    return {count: {s: _seconds_of(s, count, passes, drafts) for s in strategies} for count in counts}


def _seconds_of(
    strategy: Strategy,
    rows: int,
    passes: Mapping[int, float],
    drafts: Mapping[tuple[str, int], Mapping[int, float]],
) -> float:
    verifying = _extrapolate(passes, rows * strategy.new)
    if strategy.drafter == PLAIN.drafter:
        return verifying
    first, third = (_extrapolate(drafts[strategy.drafter, depth], rows) for depth in _DEPTHS)
    further = max(0.0, third - first) / (_DEPTHS[1] - _DEPTHS[0])
    return verifying + first + (strategy.depth - _DEPTHS[0]) * further


def _extrapolate(points: Mapping[int, float], x: int) -> float:
    """Return the value at `x` by linear interpolation between the points. Beyond the last point, follow the line
    through the last two. If that line falls, return the last value."""
    *_, before, last = min(points), *sorted(points)
    beyond = max(0, x - last) / max(1, last - before)
    return interpolate(points, x) + beyond * max(0.0, points[last] - points[before])


def _engine(
    target: Decoder,
    config: EngineConfig,
    drafters: Sequence[Drafter],
    layout: FeatureLayout | None,
    rows: int,
    length: int,
) -> Engine:
    """Return an engine in which `rows` rows have begun to decode the same prompt of `length` tokens."""
    widest = Strategy(PLAIN.drafter, max(_NEW) - 1)
    engine = Engine(target, config, drafters, Fixed(widest), layout=layout)
    # even a small cache needs room for one row of the profile
    cache, least = engine.cache, length + _TOKENS + engine.rollout.scheduler.headroom
    cache.bound_tokens = max(cache.bound_tokens, rounded_up(least, cache.store.key_counts))
    prompt = Prompt(-1, "", tuple(i % target.options.vocab_size for i in range(length)))
    sampling = SamplingParams(max_new_tokens=min(_TOKENS, target.options.max_positions - length))
    engine.start([Request(prompt, 0, 0, i, sampling) for i in range(rows)])
    engine.round()  # prefill
    return engine


def _verify(engine: Engine, new: int) -> None:
    strategy = Strategy(PLAIN.drafter, new - 1)
    engine.make_room(strategy)
    engine.verify(engine.open_round(strategy), [Draft([0] * (new - 1))] * len(engine.rows))


def _draft(engine: Engine, drafter: str, depth: int) -> None:
    engine.draft(engine.open_round(Strategy(drafter, depth)))


def _least_seconds(
    calls: Mapping[Hashable, tuple[int, Callable[[], object]]], most: float, device: torch.device
) -> dict[Hashable, float]:
    """Return the shortest of up to 5 timings of each call, in seconds. `calls` maps names to (tokens of the pass,
    function), sorted by tokens. A call is skipped if it is expected to make the total exceed `most` seconds."""
    least: dict[Hashable, float] = {}
    began, rate = time.perf_counter(), 0.0
    for _ in range(_REPEATS):
        for name, (tokens, call) in calls.items():
            start = time.perf_counter()
            expected = least.get(name, rate * tokens)
            if rate and start - began + expected > most:
                continue
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - start
            least[name] = min(least.get(name, math.inf), seconds)
            rate = seconds / tokens if tokens else rate
    return least
