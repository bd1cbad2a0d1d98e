"""Modes of `tlt verify`: all kinds of speculative decoding by our own engine or by vLLM, and plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tlt.build import open_target, without_look_ahead
from tlt.cluster.coordinator import Coordinator
from tlt.cluster.remote import ClusterRollout, local_rollout
from tlt.cluster.run_worker import RunWorker
from tlt.config import Config, EngineConfig
from tlt.draft.ahead import Ahead, AheadStore
from tlt.draft.drafter import Drafter
from tlt.draft.eagle import EagleLayer, eagle_options, load_drafter
from tlt.draft.learned import EagleDrafter
from tlt.draft.quantized import QuantizedDrafter, can_quantize
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.drafters import all_drafters, make_drafters
from tlt.engine.engine import Engine
from tlt.engine.own_backend import make_tuner
from tlt.engine.protocol import RolloutEngine
from tlt.engine.tuner import Fixed, Tuner
from tlt.environments.episodes import Turns
from tlt.loop import Rollout, Trainable
from tlt.models.decoder import Decoder
from tlt.rl.policy import Policy
from tlt.spelling import Detokenizer
from tlt.types import Request, Response, RolloutStats
from tlt.vllm.target import VllmTarget
from tlt.vllm.vllm_engine import VllmEngine

_MOVED = 0.02  # standard deviation of the relative noise on weights before the first update


class OlderTarget:
    """Target with the weights of the previous step, whose tokens serve as look-ahead drafts. In the first step it has
    the weights of this step plus a little noise.

    It decodes a request once per step, for all modes."""

    def __init__(self, target: Decoder, config: EngineConfig, detokenize: Detokenizer) -> None:
        self.target = target.empty()
        self.target.cuda_graphs = target.cuda_graphs
        self.config, self.detokenize = config, detokenize
        self.store = AheadStore()
        self._weights: dict[int, Mapping[str, Tensor]] = {}
        self._version = self._decoded = -1  # versions of the policy: now, and when the store was filled

    def sync(self, policy: Trainable, version: int) -> None:
        """Save a copy of the policy's weights of this version, unless it is saved already. Every mode of a step syncs
        the same two versions: before and after the update."""
        self._version = version
        if version not in self._weights:
            self._weights[version] = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
            self._weights.pop(version - 2, None)

    def tokens_of(self, requests: Sequence[Request]) -> list[Ahead]:
        """Return the older target's tokens for these requests. Only requests without saved tokens are decoded."""
        if self._version != self._decoded:
            older = self._weights.get(self._version - 1) or _moved(self._weights[self._version])
            self.target.load(older, max(0, self._version - 1))  # a negative version means no weights
            self.store, self._decoded = AheadStore(), self._version
        engine = Engine(self.target, self.config, detokenize=self.detokenize, store=self.store)
        engine.look_ahead(request for request in requests if self.store.get(request) is None)
        while engine.looks_ahead:
            engine.round()
        return [ahead for request in requests if (ahead := self.store.get(request))]


def _moved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with relative Gaussian noise of 2 %. Tied tensors stay equal, because the noise depends on the
    shape alone."""
    moved = {}
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        moved[name] = tensor * (1 + _MOVED * noise.to(tensor))
    return moved


class LookAheadRollout(ClusterRollout):
    """Rollout that has the older target's tokens as look-ahead drafts before it decodes."""

    def __init__(self, coordinator: Coordinator, older: OlderTarget) -> None:
        super().__init__(coordinator)
        self.older = older

    def sync(self, policy: Trainable, version: int) -> None:
        super().sync(policy, version)
        self.older.sync(policy, version)

    def generate(
        self, requests: Sequence[Request], on_response: Callable[[Response], None], coming: Iterable[list[Request]] = ()
    ) -> tuple[list[Response], RolloutStats]:
        self.coordinator.idle.ahead.store.put(self.older.tokens_of(requests))
        return super().generate(requests, on_response, coming)


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
