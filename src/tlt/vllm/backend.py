"""Backend for `engine.backend = "vllm"`: vLLM decodes and samples with tlt's noise. Modules of vLLM are imported only
when a target starts vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tlt.config import Config, EngineConfig, ModelConfig, SpeculationConfig
from tlt.draft.ahead import AheadStore
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import Transcript
from tlt.engine.protocol import Target
from tlt.models.choose import folder_weights
from tlt.models.families import decoder_options, read_config
from tlt.models.hugging_face import empty_model, is_named, names_of_ends
from tlt.models.model_folder import ModelError
from tlt.spelling import Detokenizer
from tlt.trace import Tracer
from tlt.vllm.engine import VllmEngine
from tlt.vllm.target import VllmTarget


class VllmBackend:
    """Backend that decodes with vLLM (protocol `Backend` of `engine/protocol.py`)."""

    start_note = "starting vLLM, which takes one or two minutes"

    def settled(self, config: Config) -> SpeculationConfig:
        return config.speculation if config.looks_ahead_in_vllm else _without_look_ahead(config.speculation)

    def trains_drafter(self, config: Config) -> bool:
        """Return whether the recipe's drafter is the learned one and the policy can compute its training data.

        vLLM returns no hidden states, so the policy computes them. A sharded policy cannot do that, because each of its
        passes needs all of its members."""
        return config.speculation.drafter == "eagle" and not config.train.shard

    def open_target(self, config: Config, folder: str | Path | None) -> VllmTarget:
        """Start vLLM with the weights in `folder`. If `folder` is None, as for training, start it with the weights of
        model.path, and let it free its KV cache during the update. Raises ModelError or VllmError."""
        _refuse_other_heads(config)
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        target = VllmTarget(config.model, config.engine, config.speculation, longest, sleeps=folder is None)
        if folder:
            target.load(folder_weights(folder, target.dtype), 0)
        return target

    def open_engine(
        self,
        config: Config,
        target: Target,
        detokenize: Detokenizer,
        layer: EagleLayer | None,
        on_harvest: Callable[[Transcript], None] | None,
        tracer: Tracer,
    ) -> VllmEngine:
        """Return an engine. vLLM loaded the learned drafter when it started, so `layer` is not used."""
        assert isinstance(target, VllmTarget), "the target belongs to another backend"
        return VllmEngine(target, config.engine, detokenize, tracer, AheadStore(), on_harvest)

    def load_engine(
        self,
        model: ModelConfig,
        speculation: SpeculationConfig,
        engine: EngineConfig,
        detokenize: Detokenizer,
        longest: int | None,
    ) -> VllmEngine:
        return VllmEngine(VllmTarget(model, engine, _without_look_ahead(speculation), longest), engine, detokenize)

    def about_cache(self, config: Config) -> str:
        return ""

    def about_speculation(self, config: Config) -> str:
        drafter, path = config.speculation.drafter, config.speculation.path
        if drafter == "adaptive":
            unused = f" ({path} is not used: set speculation.drafter = 'eagle' to use it)" if path else ""
            return f"look-ahead, with vLLM{unused}"
        learned = f" with {path}" if path else ""
        return f"{drafter}{learned}, with vLLM"


def _refuse_other_heads(config: Config) -> None:
    """Raise ModelError for a LoRA adapter on the head or the embedding if these two are tied. vLLM keeps one tensor for
    both, but the adapter changes only one of them."""
    lora, family = config.train.lora, read_config(config.model.path)
    if not (lora.rank and decoder_options(family).tied):
        return
    ends = names_of_ends(empty_model(family))
    if odd := [target for target in lora.targets if any(is_named(end, target) for end in ends)]:
        raise ModelError(
            f"train.lora.targets has {odd[0]}, but the model's head and embedding are tied, and vLLM keeps one "
            "tensor for both: remove that target, or set engine.backend = 'tlt'"
        )


def _without_look_ahead(speculation: SpeculationConfig) -> SpeculationConfig:
    """Return the speculation settings for vLLM without look-ahead. The drafter `adaptive` is replaced by the learned
    drafter of `speculation.path`, or by plain decoding if there is no path. vLLM's n-gram drafter is not used, because
    it drafts even if that is slower than plain decoding."""
    if speculation.drafter != "adaptive":
        return speculation
    return speculation.model_copy(update={"drafter": "eagle" if speculation.path else "off"})
