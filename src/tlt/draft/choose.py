"""Factory of a recipe's drafters."""

from __future__ import annotations

from tlt.config import SpeculationConfig
from tlt.config.registry import DRAFTERS, learned, maker
from tlt.draft.drafter import Drafter, Sources
from tlt.draft.eagle import EagleLayer, load_drafter
from tlt.draft.features import FeatureLayout
from tlt.models.decoder import Decoder


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
