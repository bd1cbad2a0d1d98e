"""Backend for `engine.backend = "vllm"`: vLLM decodes and samples with tlt's noise. Modules of vLLM are imported only
when a target starts vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tlt.config import Config, EngineConfig, ModelConfig, SpeculationConfig
from tlt.draft.ahead import AheadStore
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import Harvest
from tlt.engine.protocol import Target
from tlt.models.families import decoder_options, read_config
from tlt.models.hugging_face import empty_model, is_named, names_of_ends
from tlt.models.loading import folder_weights
from tlt.models.model_folder import ModelError
from tlt.spelling import Detokenizer
from tlt.trace import Tracer
from tlt.vllm.target import VllmTarget, start_vllm
from tlt.vllm.vllm_engine import VllmEngine


class VllmBackend:
    """Backend that decodes with vLLM (protocol `Backend` of `engine/protocol.py`)."""

    start_note = "starting vLLM, which takes one or two minutes"

    def open_target(self, config: Config, folder: str | Path | None) -> VllmTarget:
        """Start vLLM with the weights in `folder`. If `folder` is None, as for training, start it with the weights of
        model.path, and let it free its KV cache during the update. Raises ModelError or VllmError."""
        _refuse_other_heads(config)
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        target = start_vllm(config.model, config.engine, config.speculation, longest, sleeps=folder is None)
        if folder:
            target.load(folder_weights(folder, target.dtype), 0)
        return target

    def open_engine(
        self,
        config: Config,
        target: Target,
        detokenize: Detokenizer,
        layer: EagleLayer | None,
        on_harvest: Callable[[Harvest], None] | None,
        tracer: Tracer,
    ) -> VllmEngine:
        assert isinstance(target, VllmTarget), "the target belongs to another backend"
        store = AheadStore()
        return VllmEngine(
            target, config.engine, detokenize, tracer, store, config.speculation, layer=layer, on_harvest=on_harvest
        )

    def load_engine(
        self,
        model: ModelConfig,
        speculation: SpeculationConfig,
        engine: EngineConfig,
        detokenize: Detokenizer,
        longest: int | None,
    ) -> VllmEngine:
        target = start_vllm(model, engine, speculation, longest)
        if target.drafts:
            target.ends.load(folder_weights(model.path, target.dtype), 0)
        return VllmEngine(target, engine, detokenize, speculation=speculation)

    def about_cache(self, config: Config) -> str:
        return ""

    def about_speculation(self, config: Config) -> str:
        learned = f" with {config.speculation.path}" if config.speculation.path else ""
        return f"{config.speculation.drafter}{learned}, with vLLM"


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
