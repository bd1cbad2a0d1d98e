"""Factory of a recipe's drafters."""

from __future__ import annotations

from collections.abc import Iterable

from tlt.config import SpeculationConfig
from tlt.config.registry import DRAFTERS, learned, maker
from tlt.draft.ahead import AheadStore
from tlt.draft.drafter import Drafter, Sources
from tlt.draft.drafter_folder import DrafterError
from tlt.draft.eagle import EagleLayer, load_drafter
from tlt.draft.features import FeatureLayout
from tlt.models.decoder import Decoder


def make_drafters(
    config: SpeculationConfig, target: Decoder, layer: EagleLayer | None = None, store: AheadStore | None = None
) -> tuple[list[Drafter], FeatureLayout | None]:
    """Return the drafters that the recipe asks for, and the layout of the hidden states that the learned drafter reads
    (None if there is no learned drafter). `layer` replaces the drafter in `config.path`. `store` is that of the engine.
    Raises DrafterError."""
    if config.drafter == "off":
        return [], None
    names = list(DRAFTERS) if config.drafter == "adaptive" else [config.drafter]
    if any(learned(name) for name in names) and config.path and not layer:
        layer = load_drafter(config.path, target.options)
    usable = [name for name in names if layer or not learned(name)]
    drafters = _made(usable, Sources(target, layer, store))
    if not drafters:
        raise DrafterError(
            f"speculation.drafter = '{config.drafter}' does not work for this model on {target.device.type}: it needs "
            "a CPU with int8 products in PyTorch, and a family of tlt's fused decoder (docs/models.md). Use 'adaptive'"
        )
    return drafters, layer.options.layout if layer and any(learned(name) for name in names) else None


def all_drafters(layer: EagleLayer, target: Decoder) -> list[Drafter]:
    return _made(DRAFTERS, Sources(target, layer))


def _made(names: Iterable[str], sources: Sources) -> list[Drafter]:
    """Return the drafters with these names. Drafters that do not support the target are left out."""
    made = [maker(DRAFTERS[name])(sources) for name in names]
    return [drafter for drafter in made if drafter is not None]
