"""The start-up profile: what a round takes by live rows and strategy, in a few seconds, before anything was decoded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import torch

from tlt.config import EngineConfig
from tlt.draft.drafter import Drafter
from tlt.draft.features import FeatureLayout
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.tree import DraftTree
from tlt.engine.engine import Engine
from tlt.engine.interpolate import interpolate
from tlt.engine.runner import most_nodes
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.types import Prompt, Request, SamplingParams

_PROMPT, _NEW, _REPEATS = 96, 64, 5
_LONG_ENOUGH = 0.15  # seconds of a call, after which it is not repeated: what takes long varies little
_SHORT, _LONG = 1, 5  # levels of the drafts that are timed: the first one costs more than those below
_ROWS, _NODES = (1, 4, 16, 64, 256), (1, 4, 17, 33, 64)
_MOST_TOKENS = 4096  # of a pass that is timed; what wider ones take is told from the others


def profile(
    target: Decoder,
    config: EngineConfig,
    drafters: Sequence[Drafter],
    strategies: Sequence[Strategy],
    layout: FeatureLayout | None,
) -> dict[int, dict[Strategy, float]]:
    """rows -> strategy -> seconds of a round, from synthetic rows. The drafters are used up: give fresh ones."""
    counts = sorted({min(rows, config.max_rows) for rows in _ROWS})
    return {rows: _profile_rows(target, config, drafters, strategies, layout, rows) for rows in counts}


def _profile_rows(
    target: Decoder,
    config: EngineConfig,
    drafters: Sequence[Drafter],
    strategies: Sequence[Strategy],
    layout: FeatureLayout | None,
    rows: int,
) -> dict[Strategy, float]:
    most = most_nodes(rows, target.options.vocab_size)
    nodes = [n for n in _NODES if n <= most and (n * rows <= _MOST_TOKENS or n <= _NODES[2])]
    widest = Strategy("plain", max(max(s.depth for s in strategies), nodes[-1] - 1), 1, nodes[-1])
    engine = Engine(target, config, drafters, Fixed(widest), layout=layout)
    longest = min(_PROMPT + _NEW, target.options.max_positions)
    new = min(_NEW, -(-longest // 2))
    # a small cache has room for one row of the profile all the same
    engine.cache.bound_tokens = max(engine.cache.bound_tokens, longest + engine.rollout.scheduler.headroom)
    engine.start(_requests(rows, target.options.vocab_size, min(_PROMPT, longest - new), new))
    engine.round()  # prefill
    drafts = {(s.drafter, d, s.branching) for s in strategies if s.drafter != PLAIN.drafter for d in (_SHORT, _LONG)}
    least = _least_seconds(
        {
            **{n: partial(_verify, engine, widest, _chain(n, target.options.max_positions - longest)) for n in nodes},
            **{d: partial(_draft, engine, Strategy(*d, widest.verify_tokens)) for d in drafts},
            PLAIN: engine.round,  # the last call, because the rows may end with it
        },
        min(_REPEATS, new - 1),
        target.device,
    )
    # more nodes or levels take no less; short calls may be timed so by noise
    verify = {n: max(0.0, least[n] - least[1]) for n in nodes}
    costs = {PLAIN: least[PLAIN]}
    for s in strategies:
        drafting = 0.0
        if s.drafter != PLAIN.drafter:
            short, long = (least[s.drafter, depth, s.branching] for depth in (_SHORT, _LONG))
            drafting = short + (s.depth - _SHORT) * max(0.0, long - short) / (_LONG - _SHORT)
        costs[s] = least[PLAIN] + _extrapolate(verify, s.nodes) + drafting
    return costs


def _extrapolate(seconds: Mapping[int, float], nodes: int) -> float:
    """Beyond the widest pass that was timed, as its width grows."""
    widest = max(seconds)
    return interpolate(seconds, nodes) * max(1.0, (nodes - 1) / max(1, widest - 1))


def _verify(engine: Engine, strategy: Strategy, tree: DraftTree) -> None:
    engine.make_room(strategy)  # rows have grown since the last round; a small cache holds fewer of them by now
    engine.verify(engine.open_round(strategy), [tree] * len(engine.rows))


def _draft(engine: Engine, strategy: Strategy) -> None:
    engine.draft(engine.open_round(strategy))


def _requests(rows: int, vocab_size: int, length: int, new: int) -> list[Request]:
    """Make requests of random prompts that no stop token ends."""
    tokens = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(max_new_tokens=new)
    return [Request(Prompt(-1 - i, "", tuple(t)), 0, 0, i, params) for i, t in enumerate(tokens)]


def _chain(nodes: int, deepest: int) -> DraftTree:
    """Make a chain whose nodes below `deepest` share its position, because the model has no position beyond."""
    order = list(range(nodes))
    depths = [min(n, deepest) for n in order]
    return DraftTree([0] * nodes, [max(0, n - 1) for n in order], depths, [1.0] * nodes, [-1] * nodes)


def _least_seconds(
    calls: Mapping[Hashable, Callable[[], object]], repeats: int, device: torch.device
) -> dict[Hashable, float]:
    """Of each call, in turns and at its fastest: a machine that is slow for a moment must not make one look dear."""
    least, spent = dict.fromkeys(calls, math.inf), dict.fromkeys(calls, 0.0)
    for _ in range(repeats):
        for name, call in calls.items():
            if spent[name] > _LONG_ENOUGH:
                continue
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - start
            least[name], spent[name] = min(least[name], seconds), spent[name] + seconds
    return least
