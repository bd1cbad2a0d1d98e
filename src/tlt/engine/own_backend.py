"""tlt's own engine as a backend (`engine.backend = "tlt"`), with the drafters and the tuner of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tlt.config import Config, EngineConfig, ModelConfig, SpeculationConfig
from tlt.config.registry import DRAFTERS
from tlt.draft.ahead import AheadStore
from tlt.draft.drafter import Drafter
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import Harvest
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.choice import Adaptive, strategies, with_ahead
from tlt.engine.drafters import make_drafters
from tlt.engine.engine import Engine
from tlt.engine.protocol import Target
from tlt.engine.tuner import Fixed, Tuner
from tlt.models.decoder import Decoder
from tlt.models.device import share_cores, torch_device
from tlt.models.loading import load_target, make_target
from tlt.spelling import Detokenizer
from tlt.trace import Tracer
from tlt.types import MAX_DRAFT_TOKENS


class OwnBackend:
    """Backend for tlt's own engine."""

    start_note = ""

    def open_target(self, config: Config, folder: str | Path | None) -> Decoder:
        return load_target(config.model, folder) if folder else make_target(config.model)

    def open_engine(
        self,
        config: Config,
        target: Target,
        detokenize: Detokenizer,
        layer: EagleLayer | None,
        on_harvest: Callable[[Harvest], None] | None,
        tracer: Tracer,
    ) -> Engine:
        assert isinstance(target, Decoder), "the target belongs to another backend"
        store = AheadStore()
        return make_engine(
            config.engine,
            config.speculation,
            target,
            detokenize,
            layer,
            on_harvest,
            tracer,
            store,
            longest=config.longest,
        )

    def load_engine(
        self,
        model: ModelConfig,
        speculation: SpeculationConfig,
        engine: EngineConfig,
        detokenize: Detokenizer,
        longest: int | None,
    ) -> Engine:
        return make_engine(engine, speculation, load_target(model, model.path), detokenize, longest=longest or 0)

    def about_cache(self, config: Config) -> str:
        share = "80 %" if torch_device(config.model).type == "cuda" else "25 %"
        size = config.engine.kv_memory_mb
        limit = f"{share} of the free memory" if size == "auto" else f"{size:,} MiB"
        rows = config.engine.most_rows(torch_device(config.model).type)
        fewer = ", or fewer by memory" if config.engine.max_rows == "auto" else ""
        batch = f"at most {rows} responses at once{fewer} (engine.max_rows)"
        return f"key-value cache: at most {limit} (engine.kv_memory_mb); {batch}"

    def about_speculation(self, config: Config) -> str:
        speculation = config.speculation
        adaptive = speculation.drafter == "adaptive"
        learned = f" with {speculation.path}" if speculation.path else ""
        shared = ", without look-ahead, because workers share cores" if adaptive and share_cores(config) else ""
        return f"{speculation.drafter}{learned}{shared}"


def make_engine(
    config: EngineConfig,
    speculation: SpeculationConfig,
    target: Decoder,
    detokenize: Detokenizer | None,
    layer: EagleLayer | None = None,
    on_harvest: Callable[[Harvest], None] | None = None,
    tracer: Tracer | None = None,
    store: AheadStore | None = None,
    *,
    longest: int = 0,
) -> Engine:
    """Return tlt's own engine for a recipe. The target needs weights only when the first rollout starts. `layer`
    replaces the learned drafter that the recipe names. `longest`: see `Engine`."""
    drafters, layout = make_drafters(speculation, target, layer, store)
    tuner = make_tuner(speculation, target, drafters)
    return Engine(
        target,
        config,
        drafters,
        tuner,
        detokenize=detokenize,
        layout=layout,
        on_harvest=on_harvest,
        tracer=tracer,
        store=store,
        longest=longest,
    )


def make_tuner(
    config: SpeculationConfig, target: Decoder, drafters: Iterable[Drafter], widest: int = MAX_DRAFT_TOKENS
) -> Tuner:
    """Return the tuner of a recipe's engine, which has these drafters. `widest`: largest number of draft tokens of a
    row in a pass."""
    if config.drafter == "off":
        return Fixed(PLAIN)
    if config.drafter != "adaptive":
        return Fixed(Strategy(config.drafter, config.depth, DRAFTERS[config.drafter].min_chance))
    rates = {drafter.name: drafter.acceptance_rate for drafter in drafters}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    arms = [arm for arm in with_ahead(strategies(rates)) if arm.new <= 1 + widest]
    return Adaptive(arms, known, padded=target.device.type != "cpu")
