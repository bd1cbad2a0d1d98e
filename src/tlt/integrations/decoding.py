"""Functions shared by the integrations: a recipe, an engine that trains its drafter, and prompt numbers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tlt.build import starting_drafter
from tlt.cluster.local import OwnTraining
from tlt.config import Config, EngineConfig, SpeculationConfig, parse_config
from tlt.draft.ahead import AheadStore
from tlt.engine.backend import make_engine
from tlt.engine.engine import Engine
from tlt.engine.exactness import check_exactness
from tlt.engine.spelling import Detokenizer
from tlt.integrations import log
from tlt.models.decoder import Decoder
from tlt.sampling import request_seed
from tlt.spot.spot import SpotTrainer
from tlt.spot.spot_worker import SpotWorker
from tlt.trace import Tracer


def recipe_of(
    model: str, folder: str, seed: int, workers: int, speculation: SpeculationConfig, engine: EngineConfig
) -> Config:
    """Return a configuration for decoding. `folder` is the run's folder. The data and reward sections are placeholders,
    because the other trainer (TRL or verl) handles prompts, rewards and the update."""
    tree = {
        "model": {"path": model},
        "data": {"path": "-"},
        "reward": {"name": "exact"},
        "cluster": {"workers": workers},
        "run": {"folder": folder, "seed": seed},
    }
    return parse_config(tree).model_copy(update={"speculation": speculation, "engine": engine})


def adaptive_engine(
    config: Config, target: Decoder, tokenizer: Any, resumed: bool = False
) -> tuple[Engine, OwnTraining]:
    """Return an engine that decodes with `target`, and the object that trains the engine's drafter.

    The weights of `target` must already be loaded. If `resumed` is True, training continues with the newest drafter in
    the run's folder. Otherwise new drafters are numbered after those in the folder. The result of the check at start is
    logged.
    """
    exactness = check_exactness(target)
    log.log(logging.INFO if exactness.exact else logging.WARNING, exactness.meaning)
    speculation, seed = config.speculation, config.run.seed
    layer = starting_drafter(config, target.options)
    trainer = SpotTrainer(layer, target, speculation.training, seed) if layer else None
    worker = SpotWorker(trainer, lambda layer: engine.draft_with(layer))
    store = AheadStore(speculation.look_ahead_tokens)
    harvest, detokenize = worker.harvest if layer else None, Detokenizer(tokenizer)
    engine = make_engine(config.engine, speculation, target, detokenize, layer, harvest, Tracer(), store)
    training = OwnTraining(worker, config, target.options, layer)
    if resumed:
        training.load_state({})
    else:
        training.number_on()
    return engine, training


def prompt_number(token_ids: Sequence[int]) -> int:
    """Return a prompt id computed from the token ids alone, so that equal prompts have equal ids."""
    return request_seed(0, f"prompt {tuple(token_ids)}", 0, 0, 0) >> 1
