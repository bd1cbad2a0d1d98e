"""Functions shared by the integrations: a recipe, a worker that trains its drafter, and prompt numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from tlt.cluster.pool import local_worker
from tlt.cluster.remote import ClusterRollout, local_rollout
from tlt.cluster.worker import Worker, decoding_parts
from tlt.config import Config, EngineConfig, SpeculationConfig, parse_config
from tlt.engine.exactness import check_exactness
from tlt.engine.protocol import Target
from tlt.integrations import log
from tlt.sampling import request_seed
from tlt.spelling import Detokenizer


def recipe_of(
    model: str, folder: str, seed: int, workers: int, new: int, speculation: SpeculationConfig, engine: EngineConfig
) -> Config:
    """Return a configuration for decoding. `folder` is the run's folder. `new` is the largest length of a response in
    tokens. The data and reward sections are placeholders, because TRL handles prompts, rewards and the update."""
    tree = {
        "model": {"path": model},
        "data": {"path": "-"},
        "reward": {"name": "exact"},
        "rollout": {"max_new_tokens": new},
        "cluster": {"workers": workers},
        "run": {"folder": folder, "seed": seed},
    }
    return parse_config(tree).model_copy(update={"speculation": speculation, "engine": engine})


def decoding_worker(
    config: Config, target: Target, tokenizer: Any, resumed: bool = False
) -> tuple[Worker, ClusterRollout]:
    """Return a worker without a policy that decodes with `target`, and its rollout.

    The weights of `target` must already be loaded. If `resumed` is True, drafter training continues with the newest
    drafter in the run's folder. Otherwise new drafters are numbered after those in the folder. The result of the check
    at start is logged.
    """
    exactness = check_exactness(target)
    log.log(logging.INFO if exactness.exact else logging.WARNING, exactness.meaning)
    worker = Worker(config, *decoding_parts(config, target, detokenize=Detokenizer(tokenizer)))
    rollout = local_rollout(worker, config)
    training = rollout.coordinator.idle.training
    if resumed:
        training.load_state({})
    else:
        training.number_on()
    return worker, rollout


def train_until(is_over: Callable[[], bool], rollout: ClusterRollout) -> None:
    """Train the drafter until `is_over()` returns True or nothing is due. Training ends within a micro-batch."""
    worker = local_worker(rollout.supervisor.pool)
    worker.is_wanted = is_over
    try:
        rollout.coordinator.idle.train_for(lambda: 0.0 if is_over() else math.inf)
    finally:
        worker.is_wanted = lambda: False


def prompt_number(token_ids: Sequence[int]) -> int:
    """Return a prompt id computed from the token ids alone, so that equal prompts have equal ids."""
    return request_seed(0, f"prompt {tuple(token_ids)}", 0, 0, 0) >> 1
