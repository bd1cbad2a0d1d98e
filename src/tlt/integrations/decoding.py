"""What tlt inside another trainer has in common, whichever that is: a recipe, an engine that trains its drafter, and
prompts by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tlt.build import make_engine, starting_drafter
from tlt.cluster.budget import Budget, harvest_to
from tlt.config import Config, EngineConfig, SpeculationConfig, parse_config
from tlt.draft.ahead import AheadStore
from tlt.draft.guard import Guard
from tlt.draft.spot import SpotTrainer
from tlt.engine.engine import Engine
from tlt.models.decoder import Decoder
from tlt.sampling import request_seed
from tlt.trace import Tracer


def recipe_of(
    model: str, folder: str, seed: int, workers: int, speculation: SpeculationConfig, engine: EngineConfig
) -> Config:
    """As of a run: what is said of prompts, rewards and the update is the other trainer's business."""
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
) -> tuple[Engine, Guard[Budget]]:
    """An engine on this target, which holds weights, and what trains its drafter, if anything does. The drafters that
    an earlier run left in its folder are gone on with where that run is `resumed`, else new ones are numbered after
    them."""
    speculation, seed = config.speculation, config.run.seed
    layer = starting_drafter(config, target.options)
    budget = Guard(Budget(SpotTrainer(layer, target, speculation.training, seed), config) if layer else None)
    store = AheadStore(speculation.look_ahead_tokens)
    harvest = harvest_to(budget) if layer else None
    engine = make_engine(config.engine, speculation, target, tokenizer, layer, harvest, Tracer(), store)
    budget.tell(lambda it: it.number_on())
    if resumed:
        budget.tell(lambda it: it.take_published(engine))
    return engine, budget


def prompt_number(token_ids: Sequence[int]) -> int:
    """The same whenever the prompt comes."""
    return request_seed(0, f"prompt {tuple(token_ids)}", 0, 0, 0) >> 1
