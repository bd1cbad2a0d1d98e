"""Functions that build the parts of a run from its recipe: backend, target, engine, learned drafter, prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tlt.config import Config, EngineConfig, ModelConfig, SpeculationConfig, section_of
from tlt.config.registry import BACKENDS, maker, may_be_learned
from tlt.data.limits import refuse_foreign_tokens, sampling_params
from tlt.data.prompts import encoder, load_prompts
from tlt.data.tokenizer import load_tokenizer
from tlt.draft.eagle import EagleLayer, eagle_options, load_drafter
from tlt.draft.features import Harvest
from tlt.engine.protocol import Backend, RolloutEngine, Target
from tlt.environments.tools import with_tools
from tlt.models.decoder import Decoder
from tlt.models.device import share_cores
from tlt.models.families import DecoderOptions, decoder_options, read_config
from tlt.models.loading import load_target
from tlt.spelling import Detokenizer
from tlt.store.checkpoint import policy_in
from tlt.store.hub import local_model
from tlt.trace import Tracer
from tlt.types import Prompt, SamplingParams

HISTORY_TOKENS = 16_000_000
"""number of tokens of the last responses that a run keeps in host memory and in checkpoints, four bytes each"""


def backend_of(config: EngineConfig) -> Backend:
    """Import and return the rollout backend that `engine.backend` names, `tlt` or `vllm`."""
    return maker(BACKENDS[config.backend])()


def load_engine(
    model: str | Path | ModelConfig | Mapping[str, Any],
    speculation: SpeculationConfig | Mapping[str, Any] | None = None,
    engine: EngineConfig | Mapping[str, Any] | None = None,
    longest: int | None = None,
) -> RolloutEngine:
    """Return an engine for a model folder, a model on the Hugging Face hub, or the newest policy in a run's folder.
    `model`, `speculation` and `engine` are sections of a recipe or mappings of their fields; `model` may be a path.

    `longest` is the largest number of tokens of a prompt and its response together (default: the model's limit).
    vLLM and `max_rows = "auto"` use it. Raises ConfigError, ModelError, DrafterError, CheckpointError or HubError."""
    named = {"path": str(model)} if isinstance(model, str | Path) else model
    model = section_of(ModelConfig, named, "model")
    model = model.model_copy(update={"path": str(policy_in(local_model(model.path)[0]))})
    speculation = section_of(SpeculationConfig, speculation, "speculation")
    engine = section_of(EngineConfig, engine, "engine")
    return backend_of(engine).load_engine(model, speculation, engine, load_detokenizer(model), longest)


def open_target(config: Config, folder: str | Path | None) -> Target:
    """Return the target model of the recipe's backend with the weights in `folder`.

    If `folder` is None, the target is for training: `rl.parity.take_weights` loads the policy's weights into it, and
    vLLM can free its KV cache during the update. Raises ModelError or VllmError."""
    return backend_of(config.engine).open_target(config, folder)


def open_engine(
    config: Config,
    target: Target,
    layer: EagleLayer | None = None,
    on_harvest: Callable[[Harvest], None] | None = None,
    tracer: Tracer | None = None,
    detokenize: Detokenizer | None = None,
) -> RolloutEngine:
    """Return an engine of the recipe's backend that decodes with `target`. `layer` is the learned drafter, if there is
    one. `on_harvest` receives training data for the drafter. `detokenize` is by default that of the recipe's model."""
    spell = detokenize or load_detokenizer(config.model)
    return backend_of(config.engine).open_engine(config, target, spell, layer, on_harvest, tracer or Tracer())


def starting_drafter(config: Config, target: DecoderOptions) -> EagleLayer | None:
    """Return the learned drafter with which the run begins, or None if the run trains no drafter. The drafter is loaded
    from `speculation.path`. Without a path its weights are random, and the same on all workers."""
    if not trains_drafter(config):
        return None
    speculation = config.speculation
    if speculation.path:
        return load_drafter(speculation.path, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        layer = EagleLayer(eagle_options(target, speculation.kind, speculation.window))
    layer.acceptance_rate = 0.0  # so the tuner need not measure that the drafts of a random drafter are rejected
    return layer


def trains_drafter(config: Config) -> bool:
    """Return whether the run trains a learned drafter."""
    training = config.speculation.training
    return may_be_learned(config.speculation.drafter) and (
        training.idle if config.cluster.workers > 1 else training.extra > 0
    )


def steps_ahead(config: SpeculationConfig) -> int:
    """Return the number of future steps for which look-ahead drafts are decoded; 0 if look-ahead is off."""
    return config.look_ahead if config.drafter == "adaptive" else 0


def history_tokens(config: SpeculationConfig) -> int:
    """Return the number of tokens of earlier responses that a run keeps; 0 if no drafter reads them."""
    return HISTORY_TOKENS if config.drafter in ("adaptive", "suffix") else 0


def load_detokenizer(model: ModelConfig) -> Detokenizer:
    """Return the detokenizer of a model. Engines use it to find stop strings."""
    return Detokenizer(load_tokenizer(model.path))


class Workplace(NamedTuple):
    """Tokenizer, prompts, target model and sampling parameters, loaded for a recipe."""

    tokenizer: Any
    prompts: list[Prompt]
    target: Decoder
    sampling: SamplingParams


def open_workplace(config: Config) -> Workplace:
    """Load the recipe's tokenizer, prompts, target model and sampling parameters. The prompts are encoded as for
    training. Raises ValueError with a message of one sentence."""
    tokenizer, config = load_tokenizer(config.model.path), with_tools(config)
    prompts = load_prompts(config.data, encoder(tokenizer, config.data))
    refuse_foreign_tokens(prompts, decoder_options(read_config(config.model.path)).vocab_size)
    target = load_target(config.model, config.model.path)
    return Workplace(tokenizer, prompts, target, sampling_params(config.rollout, config.model.path, tokenizer))


def for_machine(config: Config) -> Config:
    """Return the configuration with the speculation that this machine allows. `speculation.look_ahead` becomes 0 if
    workers share CPU cores."""
    return without_look_ahead(config) if share_cores(config) else config


def without_look_ahead(config: Config) -> Config:
    speculation = config.speculation.model_copy(update={"look_ahead": 0})
    return config.model_copy(update={"speculation": speculation})
