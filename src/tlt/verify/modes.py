"""Modes of `tlt verify`: all kinds of speculative decoding by our own engine or by vLLM, and plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from tlt.build import open_target, without_look_ahead
from tlt.cluster.remote import ClusterRollout, local_rollout
from tlt.cluster.run_worker import RunWorker
from tlt.config import Config
from tlt.draft.ahead import AheadStore
from tlt.draft.drafter import Drafter
from tlt.draft.eagle import EagleLayer, eagle_options, load_drafter
from tlt.draft.learned import EagleDrafter
from tlt.draft.quantized import QuantizedDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.drafters import all_drafters, make_drafters
from tlt.engine.engine import Engine
from tlt.engine.own_backend import make_tuner
from tlt.engine.protocol import RolloutEngine
from tlt.engine.tuner import Fixed, Tuner
from tlt.environments.episodes import Turns
from tlt.loop import Rollout
from tlt.models.decoder import Decoder
from tlt.models.int8 import can_quantize
from tlt.rl.policy import Policy
from tlt.spelling import Detokenizer
from tlt.verify.look_ahead import LookAheadRollout, OlderTarget
from tlt.vllm.target import VllmTarget
from tlt.vllm.vllm_engine import VllmEngine

_LEARNED, _SUFFIX = Strategy("eagle", 4), Strategy("suffix", 6)
_CHANGING = (*[PLAIN] * 3, *[_LEARNED] * 2, _SUFFIX)


def modes(config: Config, target: Decoder, tokenizer: Any, turns: Turns, policy: Policy) -> dict[str, Rollout]:
    """Return the rollout of each mode by name. The first mode of a step queries the environment; the others reuse its
    replies. Our own engines share the target.

    The learned drafter is loaded from `speculation.path`. Without a path its weights are random."""
    if config.engine.backend == "vllm":
        return _vllm_modes(config, target, tokenizer, turns, policy)
    spell, layer = Detokenizer(tokenizer), _learned_layer(config, target)
    adaptive = config.speculation.model_copy(update={"drafter": "adaptive"})
    tuner = make_tuner(adaptive, target, make_drafters(adaptive, target)[0])

    def engine(drafters: Sequence[Drafter], tuner: Tuner, store: AheadStore | None = None) -> Engine:
        learned = any(isinstance(drafter, EagleDrafter) for drafter in drafters)
        layout = layer.options.layout if learned else None
        return Engine(target, config.engine, drafters, tuner, detokenize=spell, layout=layout, store=store)

    def rollout(tuner: Tuner, *drafters: Drafter) -> ClusterRollout:
        return _rollout(engine(drafters, tuner), config, turns, policy)

    found: dict[str, Rollout] = {
        "suffix": rollout(Fixed(_SUFFIX), SuffixDrafter()),
        "learned": rollout(Fixed(_LEARNED), EagleDrafter(layer, target)),
    }
    if can_quantize(target):
        found["quantized"] = rollout(Fixed(Strategy("quantized", 4)), QuantizedDrafter(target))
    found["off and on"] = rollout(InTurn(_CHANGING), *all_drafters(layer, target))
    found["adaptive"] = rollout(tuner, *all_drafters(layer, target))
    ahead = _rollout(engine(all_drafters(layer, target), tuner, AheadStore()), config, turns, policy)
    found["look-ahead"] = LookAheadRollout(ahead.coordinator, OlderTarget(target, config.engine, spell))
    return found | {"plain": rollout(Fixed(PLAIN))}  # plain is last, because the next step starts from its state


def _vllm_modes(config: Config, target: Decoder, tokenizer: Any, turns: Turns, policy: Policy) -> dict[str, Rollout]:
    """Return the modes of vLLM, which share one vLLM, and plain decoding by our own engine with `target`."""
    spell, speculation = Detokenizer(tokenizer), config.speculation
    drafting = speculation.model_copy(update={"drafter": "adaptive"})
    vllm = open_target(config.model_copy(update={"speculation": drafting}), config.model.path)
    assert isinstance(vllm, VllmTarget), "engine.backend must be vllm"
    layer = _learned_layer(config, target)

    def engine(drafter: str, store: AheadStore | None = None) -> VllmEngine:
        asked = speculation.model_copy(update={"drafter": drafter})
        return VllmEngine(vllm, config.engine, spell, store=store, speculation=asked, layer=layer)

    def rollout(engine: RolloutEngine) -> ClusterRollout:
        return _rollout(engine, config, turns, policy)

    older = OlderTarget(target, config.engine, spell)
    return {
        "vllm": rollout(engine("off")),
        "vllm, suffix": rollout(engine("suffix")),
        "vllm, learned": rollout(engine("eagle")),
        "vllm, adaptive": rollout(engine("adaptive")),
        "vllm, look-ahead": LookAheadRollout(rollout(engine("adaptive", AheadStore())).coordinator, older),
        # plain is last, because the next step starts from its state
        "plain": rollout(Engine(target, config.engine, detokenize=spell)),
    }


def _rollout(engine: RolloutEngine, config: Config, turns: Turns, policy: Policy) -> ClusterRollout:
    """Return the rollout of a worker in this process that has this engine and does not look ahead."""
    config = without_look_ahead(config)
    return local_rollout(RunWorker(config, engine, None, policy), config, turns)


def _learned_layer(config: Config, target: Decoder) -> EagleLayer:
    speculation = config.speculation
    if speculation.path:
        return load_drafter(speculation.path, target.options)
    return EagleLayer(eagle_options(target.options, speculation.kind, speculation.window))


class InTurn(Fixed):
    """Tuner that cycles through strategies, one per round."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self.strategies = tuple(strategies)
        self._turn = itertools.cycle(strategies)

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        return next(self._turn)
