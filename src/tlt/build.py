"""Builders of the parts of a recipe: target, drafters, tuner, engine, prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tlt.config import Config, EngineConfig, ModelConfig, SpeculationConfig, section_of
from tlt.config.registry import DRAFTERS, learned, maker, may_be_learned
from tlt.data.limits import refuse_foreign_tokens
from tlt.data.prompts import encoder, load_prompts
from tlt.data.sampling_params import sampling_params
from tlt.data.tokenizer import load_tokenizer
from tlt.draft.ahead import AheadStore
from tlt.draft.drafter import Drafter, Sources
from tlt.draft.eagle import EagleLayer, eagle_options, load_drafter
from tlt.draft.features import FeatureLayout
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.bandit import Bandit, strategies, with_ahead
from tlt.engine.engine import Engine
from tlt.engine.profile import profile
from tlt.engine.protocol import RolloutEngine, Target
from tlt.engine.spelling import Detokenizer
from tlt.engine.tuner import Fixed, Tuner
from tlt.models.choose import decoder_for, folder_weights
from tlt.models.decoder import Decoder
from tlt.models.device import share_cores, torch_device, torch_dtype
from tlt.models.families import DecoderOptions, ModelError, decoder_options, read_config
from tlt.progress import working
from tlt.rewards.tools import with_tools
from tlt.spot.buffer import Harvest, Transcript
from tlt.store.checkpoint import policy_in
from tlt.store.hub import local_model
from tlt.trace import Tracer
from tlt.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from tlt.vllm.target import VllmTarget


def make_engine(
    config: EngineConfig,
    speculation: SpeculationConfig,
    target: Decoder,
    tokenizer: Any,
    layer: EagleLayer | None = None,
    on_harvest: Callable[[Harvest], None] | None = None,
    tracer: Tracer | None = None,
    store: AheadStore | None = None,
) -> Engine:
    """Return our own engine for a recipe. The target must hold weights. `layer` replaces the learned drafter that the
    recipe names. If the drafter is `adaptive`, the first rollout profiles the machine."""
    drafters, layout = make_drafters(speculation, target, layer)
    tuner = make_tuner(speculation, config, target, layer)
    return Engine(target, config, drafters, tuner, Detokenizer(tokenizer), layout, on_harvest, tracer, store)


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
    tokenizer = load_tokenizer(model.path)
    if engine.backend == "vllm":
        from tlt.vllm.engine import VllmEngine

        longest = longest or decoder_options(read_config(model.path)).max_positions
        speculation = without_look_ahead(speculation)
        return VllmEngine(vllm_target(model, engine, speculation, longest), engine, Detokenizer(tokenizer))
    return make_engine(engine, speculation, _load_target(model, model.path), tokenizer)


def open_target(config: Config, folder: str | Path | None) -> Target:
    """Return the target of the recipe's engine with the weights in `folder`.

    If `folder` is None, the target is for training: it gets its weights from `take_weights`, and vLLM can free memory
    for the update. Raises ModelError or VllmError."""
    if config.engine.backend == "vllm":
        _refuse_other_heads(config)
        most_new = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
        longest = config.data.max_prompt_tokens + most_new
        target = vllm_target(config.model, config.engine, config.speculation, longest, sleeps=folder is None)
        if folder:
            target.load(folder_weights(folder, target.dtype), 0)
        return target
    return _load_target(config.model, folder) if folder else make_target(config.model)


def _refuse_other_heads(config: Config) -> None:
    """Raise ModelError for an adapter on a tied head or embedding. vLLM keeps one tensor for both, and the adapter
    would make them different."""
    lora, options = config.train.lora, decoder_options(read_config(config.model.path))
    if lora.rank and options.tied and (ends := {"lm_head", "embed_tokens"} & set(lora.targets)):
        raise ModelError(
            f"train.lora.targets has {min(ends)}, and the model's head is tied to its embedding, which vLLM cannot "
            "separate: remove that target, or set engine.backend = 'tlt'"
        )


def vllm_target(
    model: ModelConfig, engine: EngineConfig, speculation: SpeculationConfig, longest: int, sleeps: bool = False
) -> VllmTarget:
    """Return a vLLM target. `longest` is the largest number of tokens of a prompt and its response together. Raises
    ModelError or VllmError."""
    from tlt.vllm.target import VllmTarget

    options = decoder_options(read_config(model.path))
    model = model.model_copy(update={"dtype": str(torch_dtype(model)).removeprefix("torch.")})
    return VllmTarget(model, engine, speculation, options, torch_device(model), longest, sleeps)


def open_engine(
    config: Config,
    target: Target,
    layer: EagleLayer | None = None,
    on_harvest: Callable[[Harvest | Transcript], None] | None = None,
    tracer: Tracer | None = None,
) -> RolloutEngine:
    """Return the recipe's engine on this target."""
    tokenizer, store = load_tokenizer(config.model.path), AheadStore(config.speculation.look_ahead_tokens)
    if isinstance(target, Decoder):
        return make_engine(
            config.engine, config.speculation, target, tokenizer, layer, on_harvest, tracer or Tracer(), store
        )
    from tlt.vllm.engine import VllmEngine
    from tlt.vllm.target import VllmTarget

    assert isinstance(target, VllmTarget), "the target belongs to another backend"
    return VllmEngine(target, config.engine, Detokenizer(tokenizer), tracer or Tracer(), store, on_harvest)


def starting_drafter(config: Config, target: DecoderOptions) -> EagleLayer | None:
    """Return the learned drafter that the run begins with; None if the run does not train one. It is loaded from
    `speculation.path`. Without a path its weights are random, and the same on all workers.

    vLLM returns no hidden states, so the policy computes the training data. A sharded policy cannot do that. So with
    vLLM a drafter is trained only if `speculation.drafter` is `eagle` and the policy is not sharded."""
    speculation = config.speculation
    trains = speculation.training.idle if config.cluster.workers > 1 else speculation.training.extra > 0
    if not may_be_learned(speculation.drafter) or not trains:
        return None
    if config.engine.backend == "vllm" and (speculation.drafter != "eagle" or config.train.shard):
        return None
    if speculation.path:
        return load_drafter(speculation.path, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        layer = EagleLayer(eagle_options(target, speculation.kind, speculation.window))
    layer.acceptance_rate = 0.0  # the tuner need not measure that a random drafter is never right
    return layer


def make_drafters(
    config: SpeculationConfig, target: Decoder, layer: EagleLayer | None = None
) -> tuple[list[Drafter], FeatureLayout | None]:
    """Return the drafters of the configured strategies, and the layout of the features that the learned drafter reads
    (None without one). Raises DrafterError."""
    if config.drafter == "off":
        return [], None
    names = list(DRAFTERS) if config.drafter == "adaptive" else [config.drafter]
    if any(learned(name) for name in names) and config.path and not layer:
        layer = load_drafter(config.path, target.options)
    sources = Sources(target, layer, config.history_tokens)
    drafters = [maker(DRAFTERS[name])(sources) for name in names if layer or not learned(name)]
    return drafters, layer.options.layout if layer and any(learned(name) for name in names) else None


def all_drafters(layer: EagleLayer, target: Decoder, history_tokens: int) -> list[Drafter]:
    return [maker(entry)(Sources(target, layer, history_tokens)) for entry in DRAFTERS.values()]


def make_tuner(
    config: SpeculationConfig, engine: EngineConfig, target: Decoder, layer: EagleLayer | None = None
) -> Tuner:
    if config.drafter == "off":
        return Fixed(PLAIN)
    if config.drafter != "adaptive":
        return Fixed(Strategy(config.drafter, config.depth, config.branching, config.verify_tokens, config.min_chance))
    drafters, layout = make_drafters(config, target, layer)
    arms = with_ahead(strategies([drafter.name for drafter in drafters], config.trees))
    known = {drafter.name: drafter.acceptance_rate for drafter in drafters if drafter.acceptance_rate is not None}

    def measure() -> dict[int, dict[Strategy, float]]:
        with working("start-up profile"):
            return profile(target, engine, drafters, arms, layout)

    return Bandit(arms, measure, known)


def steps_ahead(config: SpeculationConfig) -> int:
    """Return the number of coming steps whose requests idle workers decode."""
    return config.look_ahead if config.drafter == "adaptive" else 0


def make_target(config: ModelConfig) -> Decoder:
    """Return a decoder for a model folder, still without weights. Raises ModelError."""
    target = decoder_for(read_config(config.path), torch_dtype(config), torch_device(config))
    target.cuda_graphs &= config.cuda_graphs
    return target


def _load_target(config: ModelConfig, folder: str | Path) -> Decoder:
    """Return a decoder with the weights in a folder. Raises ModelError."""
    target = make_target(config)
    with working(f"load {folder}"):
        target.load(folder_weights(folder, target.dtype), version=0)
    return target


def load_detokenizer(model: ModelConfig) -> Detokenizer:
    """Return the detokenizer of a model. Engines use it to find stop strings."""
    return Detokenizer(load_tokenizer(model.path))


class Workplace(NamedTuple):
    """Parts that decode a recipe's prompts."""

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
    target = _load_target(config.model, config.model.path)
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
    if config.engine.backend == "vllm" and not config.looks_ahead_in_vllm:
        config = config.model_copy(update={"speculation": without_look_ahead(config.speculation)})
    return config


def without_look_ahead(speculation: SpeculationConfig) -> SpeculationConfig:
    """Replace `adaptive` for a vLLM without look-ahead: by the learned drafter of `speculation.path`, or by plain
    decoding if there is none. vLLM's n-gram drafter is not used, because it drafts even where this is slower."""
    if speculation.drafter != "adaptive":
        return speculation
    return speculation.model_copy(update={"drafter": "eagle" if speculation.path else "off"})
