"""Modes of `tlt verify`: all kinds of speculative decoding, and plain decoding."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tlt.build import all_drafters, make_tuner
from tlt.cluster.local import LocalRollout
from tlt.config import Config
from tlt.draft.ahead import AheadStore
from tlt.draft.drafter import Drafter
from tlt.draft.eagle import EagleLayer, eagle_options, load_drafter
from tlt.draft.hostile import AdversarialDrafter, RandomDrafter
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.engine import Engine
from tlt.engine.spelling import Detokenizer
from tlt.engine.tuner import Fixed, Tuner
from tlt.loop import Rollout
from tlt.models.decoder import Decoder
from tlt.rewards.turns import Turns
from tlt.verify.look_ahead import MOST_TOKENS, LookAheadRollout, OlderTarget, spoiled
from tlt.verify.several import SeveralWorkers

_WIDE = (3, 4, 12)  # depth, branching, tokens to verify
_AHEAD = 16


def modes(config: Config, target: Decoder, tokenizer: Any, turns: Turns) -> dict[str, Rollout]:
    """Return name -> rollout. All engines share the target.

    The learned drafter is the recipe's if it names one, else a random one of the recipe's kind."""
    speculation, vocab_size = config.speculation, target.options.vocab_size
    layer = _layer(config, target)

    def suffix() -> SuffixDrafter:
        return SuffixDrafter(speculation.history_tokens)

    def engine(
        drafters: Sequence[Drafter], tuner: Tuner, store: AheadStore | None = None, kv_tokens: int | None = None
    ) -> Engine:
        layout = layer.options.layout if any(isinstance(d, EagleDrafter) for d in drafters) else None
        spelled = Detokenizer(tokenizer)
        return Engine(target, config.engine, drafters, tuner, spelled, layout, store=store, kv_tokens=kv_tokens)

    def everything() -> list[Drafter]:
        return all_drafters(layer, target, speculation.history_tokens)

    chain, tree = Strategy("eagle", 4, 1, 5), Strategy("eagle", *_WIDE)
    changing = [PLAIN] * 3 + [tree] * 2 + [tree._replace(drafter="suffix")]
    adaptive = make_tuner(speculation.model_copy(update={"drafter": "adaptive"}), config.engine, target)
    one = {
        "suffix": engine([suffix()], Fixed(Strategy("suffix", 6, 2, 8, 0.5))),
        "suffix, wide": engine([suffix()], Fixed(Strategy("suffix", *_WIDE))),
        "random": engine([RandomDrafter(vocab_size)], Fixed(Strategy("random", *_WIDE))),
        "adversarial": engine([AdversarialDrafter(vocab_size)], Fixed(Strategy("adversarial", *_WIDE))),
        "learned, chain": engine([EagleDrafter(layer, target)], Fixed(chain)),
        "learned, tree": engine([EagleDrafter(layer, target)], Fixed(tree)),
        "off and on": engine(everything(), InTurn(changing)),
        "adaptive": engine(everything(), adaptive),
    }
    older = OlderTarget(target, config.engine, Detokenizer(tokenizer))
    store, spoiled_store = AheadStore(MOST_TOKENS), AheadStore(MOST_TOKENS)
    mishaps = Fixed(chain._replace(ahead=_AHEAD))
    looking: dict[str, Rollout] = {
        "look-ahead": LookAheadRollout(engine(everything(), adaptive, store), older, turns),
        "look-ahead, spoiled": LookAheadRollout(
            engine([EagleDrafter(layer, target)], mishaps, spoiled_store),
            older,
            turns,
            lambda entries: spoiled(entries, vocab_size, random.Random(target.version)),
        ),
    }
    weights = itertools.cycle([layer, _fresh(config, target)])
    swapping = Swapping(tree, lambda: swapped.swap(EagleDrafter(next(weights), target)))
    swapped = engine([EagleDrafter(layer, target)], swapping)
    ahead = [strategy._replace(ahead=_AHEAD) for strategy in (PLAIN, chain, tree)]
    several = SeveralWorkers(
        lambda store, kv_tokens: engine(everything(), InTurn([chain, *changing, *ahead]), store, kv_tokens),
        target,
        lambda other: other.swap(EagleDrafter(next(weights), target)),
        turns,
    )
    # plain is last, because the next step starts from its state
    last = {"swapped every round": swapped, "plain": engine([], Fixed(PLAIN))}
    return {"several workers": several, **_alone(one, turns), **looking, **_alone(last, turns)}


def _alone(engines: Mapping[str, Engine], turns: Turns) -> dict[str, Rollout]:
    return {name: LocalRollout(engine, turns=turns) for name, engine in engines.items()}


def _layer(config: Config, target: Decoder) -> EagleLayer:
    path = config.speculation.path
    return load_drafter(path, target.options) if path else _fresh(config, target)


def _fresh(config: Config, target: Decoder) -> EagleLayer:
    """Return a drafter with random weights, which differ at every call."""
    return EagleLayer(eagle_options(target.options, config.speculation.kind, config.speculation.window))


class InTurn(Fixed):
    """Tuner that cycles through strategies, one per round."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self.strategies = tuple(strategies)
        self._turn = itertools.cycle(strategies)

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        return next(self._turn)


class Swapping(Fixed):
    """Tuner with one strategy, which calls `action` before each round."""

    def __init__(self, strategy: Strategy, action: Callable[[], None]) -> None:
        super().__init__(strategy)
        self.action = action

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        self.action()
        return super().choose(rows, context, usable, offers)
