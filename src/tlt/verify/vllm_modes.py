"""Modes of `tlt verify --backend vllm`: each kind of decoding by vLLM with the shared noise, and plain decoding by
our own engine."""

from __future__ import annotations

from typing import Any

from tlt.build import open_target
from tlt.cluster.local import LocalRollout
from tlt.config import Config
from tlt.draft.ahead import AheadStore
from tlt.engine.engine import Engine
from tlt.engine.spelling import Detokenizer
from tlt.loop import Rollout
from tlt.models.decoder import Decoder
from tlt.rewards.turns import Turns
from tlt.verify.look_ahead import MOST_TOKENS, LookAheadRollout, OlderTarget
from tlt.vllm.engine import VllmEngine
from tlt.vllm.target import VllmTarget


def vllm_modes(config: Config, target: Decoder, tokenizer: Any, turns: Turns) -> dict[str, Rollout]:
    """Return the rollout of each mode by name. Each mode has its own vLLM, except plain decoding by our own engine with
    `target`."""
    spell = Detokenizer(tokenizer)

    def engine(drafter: str, store: AheadStore | None = None) -> VllmEngine:
        speculation = config.speculation.model_copy(update={"drafter": drafter})
        vllm = open_target(config.model_copy(update={"speculation": speculation}), config.model.path)
        assert isinstance(vllm, VllmTarget), "engine.backend must be vllm"
        return VllmEngine(vllm, config.engine, spell, store=store)

    store, older = AheadStore(MOST_TOKENS), OlderTarget(target, config.engine, spell)
    found: dict[str, Rollout] = {
        "vllm": LocalRollout(engine("off"), turns=turns),
        "vllm, look-ahead": LookAheadRollout(engine("adaptive", store), older, turns),
    }
    if config.speculation.path:
        found["vllm, learned"] = LocalRollout(engine("eagle"), turns=turns)
    # n-gram lookup is the last vLLM: it loads numba, and then no other vLLM starts in the same process
    found["vllm, n-gram"] = LocalRollout(engine("suffix"), turns=turns)
    # plain is last, because the next step starts from its state
    return found | {"plain": LocalRollout(Engine(target, config.engine, detokenize=spell), turns=turns)}
