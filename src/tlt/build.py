"""Builders of the parts of a recipe: backend, target, engine, learned drafter, prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tlt.config import Config, EngineConfig, ModelConfig, SpeculationConfig, section_of
from tlt.config.registry import BACKENDS, maker, may_be_learned
from tlt.data.limits import refuse_foreign_tokens
from tlt.data.prompts import encoder, load_prompts
from tlt.data.sampling_params import sampling_params
from tlt.data.tokenizer import load_tokenizer
from tlt.draft.eagle import EagleLayer, eagle_options, load_drafter
from tlt.engine.protocol import Backend, RolloutEngine, Target
from tlt.engine.spelling import Detokenizer
from tlt.models.choose import load_target
from tlt.models.decoder import Decoder
from tlt.models.device import share_cores, torch_dtype
from tlt.models.families import DecoderOptions, decoder_options, read_config
from tlt.rewards.tools import with_tools
from tlt.spot.buffer import Harvest, Transcript
from tlt.store.checkpoint import policy_in
from tlt.store.hub import local_model
from tlt.trace import Tracer
from tlt.types import Prompt, SamplingParams


def backend_of(config: EngineConfig) -> Backend:
    """Return the backend that `engine.backend` names. Its modules are imported now."""
    return maker(BACKENDS[config.backend])()


def load_engine(
    model: str | Path | ModelConfig | Mapping[str, Any],
    speculation: SpeculationConfig | Mapping[str, Any] | None = None,
    engine: EngineConfig | Mapping[str, Any] | None = None,
    longest: int | None = None,
) -> RolloutEngine:
    """Return an engine for a model folder, a model on the Hugging Face hub, or the newest policy in a run's folder.
    Each argument is a section of a recipe or a mapping of its fields; `model` may be a path.

    `longest` is the largest number of tokens of a prompt and its response together (default: the model's limit). Only
    vLLM uses it. Raises ConfigError, ModelError, DrafterError, CheckpointError or HubError."""
    named = {"path": str(model)} if isinstance(model, str | Path) else model
    model = section_of(ModelConfig, named, "model")
    model = model.model_copy(update={"path": str(policy_in(local_model(model.path)[0]))})
    speculation = section_of(SpeculationConfig, speculation, "speculation")
    engine = section_of(EngineConfig, engine, "engine")
    return backend_of(engine).load_engine(model, speculation, engine, load_detokenizer(model), longest)


def open_target(config: Config, folder: str | Path | None) -> Target:
    """Return the target of the recipe's engine with the weights in `folder`.

    If `folder` is None, the target is for training: it gets its weights from `take_weights`, and vLLM can free memory
    for the update. Raises ModelError or VllmError."""
    return backend_of(config.engine).open_target(config, folder)


def open_engine(
    config: Config,
    target: Target,
    layer: EagleLayer | None = None,
    on_harvest: Callable[[Harvest | Transcript], None] | None = None,
    tracer: Tracer | None = None,
) -> RolloutEngine:
    """Return the recipe's engine on this target."""
    backend, detokenize = backend_of(config.engine), load_detokenizer(config.model)
    return backend.open_engine(config, target, detokenize, layer, on_harvest, tracer or Tracer())


def starting_drafter(config: Config, target: DecoderOptions) -> EagleLayer | None:
    """Return the learned drafter that the run begins with; None if the run does not train one. It is loaded from
    `speculation.path`. Without a path its weights are random, and the same on all workers."""
    speculation = config.speculation
    trains = speculation.training.idle if config.cluster.workers > 1 else speculation.training.extra > 0
    if not may_be_learned(speculation.drafter) or not trains or not backend_of(config.engine).trains_drafter(config):
        return None
    if speculation.path:
        return load_drafter(speculation.path, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        layer = EagleLayer(eagle_options(target, speculation.kind, speculation.window))
    layer.acceptance_rate = 0.0  # the tuner need not measure that a random drafter is never right
    return layer


def steps_ahead(config: SpeculationConfig) -> int:
    """Return the number of coming steps whose requests idle workers decode."""
    return config.look_ahead if config.drafter == "adaptive" else 0


def load_detokenizer(model: ModelConfig) -> Detokenizer:
    """Return the detokenizer of a model. Engines use it to find stop strings."""
    return Detokenizer(load_tokenizer(model.path))


class Workplace(NamedTuple):
    """Tokenizer, prompts, target and sampling parameters of a recipe."""

    tokenizer: Any
    prompts: list[Prompt]
    target: Decoder
    sampling: SamplingParams


def open_workplace(config: Config) -> Workplace:
    """Load the prompts as for training, and the target with the model's weights. Raises a ValueError whose message is
    one sentence."""
    tokenizer, config = load_tokenizer(config.model.path), with_tools(config)
    prompts = load_prompts(config.data, encoder(tokenizer, config.data))
    refuse_foreign_tokens(prompts, decoder_options(read_config(config.model.path)).vocab_size)
    target = load_target(config.model, config.model.path)
    return Workplace(tokenizer, prompts, target, sampling_params(config.rollout, config.model.path, tokenizer))


def settled(config: Config) -> Config:
    """Return the configuration as it is used on this machine and recorded for the run.

    `auto` becomes a dtype. Look-ahead is turned off if workers share cores. With vLLM, `adaptive` becomes a fixed
    drafter, unless look-ahead is used."""
    dtype = str(torch_dtype(config.model)).removeprefix("torch.")
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    if share_cores(config):
        speculation = config.speculation.model_copy(update={"look_ahead": 0})
        config = config.model_copy(update={"speculation": speculation})
    return config.model_copy(update={"speculation": backend_of(config.engine).settled(config)})
