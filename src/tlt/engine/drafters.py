"""The engine's drafters: those of a recipe, and their isolation. A drafter that fails reduces speed but changes no
token."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from tlt.config import SpeculationConfig
from tlt.config.registry import DRAFTERS, learned, maker
from tlt.draft.ahead import AheadStore, LookAhead
from tlt.draft.chains import Calibration, Draft, Roots, draft_chains
from tlt.draft.drafter import CacheDrafter, Drafter, Sources
from tlt.draft.drafter_folder import DrafterError
from tlt.draft.eagle import EagleLayer, load_drafter
from tlt.draft.features import FeatureLayout, FeatureView
from tlt.engine.kv_cache import KVCache
from tlt.engine.memory import most_new
from tlt.engine.noise_window import DraftNoise, NoiseWindow
from tlt.engine.rows import RowTable
from tlt.engine.state import Round
from tlt.models.decoder import Decoder
from tlt.types import Request, RolloutStats, Row

log = logging.getLogger(__name__)
T = TypeVar("T")


_WATCHED = 1000  # number of drafts in the running acceptance rate


class AcceptanceRate:
    """Acceptance rates of a drafter's first draft token: `now`, over its last 1,000 drafts, and `published`.

    `published` is the rate that was measured when the drafter was trained. Without this measurement, `published` is the
    rate over the first 1,000 drafts in the engine."""

    def __init__(self, published: float | None) -> None:
        self.published = published
        self.last: deque[bool] = deque(maxlen=_WATCHED)
        self.right = 0

    def add(self, right: bool) -> None:
        self.right += right - (self.last[0] if len(self.last) == _WATCHED else False)
        self.last.append(right)
        if self.published is None and len(self.last) == _WATCHED:
            self.published = self.now

    @property
    def now(self) -> float:
        return self.right / max(1, len(self.last))

    @property
    def alarming(self) -> bool:
        """Whether `now` is below half of `published`. It is False before 1,000 drafts. This is the only sign of a bad
        drafter, because a drafter changes no token."""
        return self.published is not None and len(self.last) == _WATCHED and self.now < 0.5 * self.published


class Drafters:
    """All drafters of the engine, as one `RowStore`. A drafter that raises an exception is dropped. Every drafter gets
    the tokens of all active rows, because any drafter may be used in the next round. `cache` is None if the engine's
    keys and values are not tlt's."""

    def __init__(self, drafters: Iterable[Drafter], cache: KVCache | None) -> None:
        self.cache = cache
        self.usable = {drafter.name: drafter for drafter in drafters}
        self.acceptance_rates = {name: AcceptanceRate(drafter.acceptance_rate) for name, drafter in self.usable.items()}
        self.calibrations = {name: Calibration() for name in self.usable}
        self.failures = 0

    def begin(self, view: FeatureView | None) -> None:
        self.failures = 0
        self._call_all(lambda drafter: self._begin(drafter, view), "begin")

    def _begin(self, drafter: Drafter, view: FeatureView | None) -> None:
        if self.cache and isinstance(drafter, CacheDrafter):
            drafter.attach(self.cache)
        drafter.begin(view)

    def append(self, row: Row, kept: int) -> None:
        request, tokens = _copied(row)
        self._call_all(lambda drafter: drafter.open(request, tokens), "open")

    def commit(self, news: Sequence[Sequence[int]]) -> None:
        """Give each drafter the new tokens of each row."""

        def enter(drafter: Drafter) -> None:
            for place, tokens in enumerate(news):
                drafter.commit(place, tuple(tokens))

        self._call_all(enter, "commit")

    def remove(self, place: int, last: int) -> None:
        self._call_all(lambda drafter: drafter.close(place, last), "close")

    def swap(self, drafter: Drafter, view: FeatureView | None, rows: Iterable[Row]) -> None:
        """Replace the drafter of the same name by `drafter`, which starts with the active `rows`. Call this between two
        rounds."""
        self.usable[drafter.name] = drafter
        self.acceptance_rates[drafter.name] = AcceptanceRate(drafter.acceptance_rate)
        self.calibrations.setdefault(drafter.name, Calibration()).renew()

        def enter() -> None:
            self._begin(drafter, view)
            for row in rows:
                drafter.open(*_copied(row))

        self.guard(drafter.name, enter, "start")

    def next_round(self) -> None:
        for calibration in self.calibrations.values():
            calibration.next_round()

    def learn(self, name: str, learned: Sequence[tuple[Draft, int]]) -> None:
        """Record drafts of a round, with the numbers of their accepted tokens."""
        self.calibrations[name].observe([(draft.cells, accepted) for draft, accepted in learned])
        for _, accepted in learned:
            self.acceptance_rates[name].add(accepted > 0)

    def propose(self, name: str, call: Callable[[], T]) -> T | None:
        """Return the result of `call`, in which the drafter drafts. If `call` raises, drop the drafter, set the keys
        and values of its draft tokens to zero, and return None."""
        drafted = self.guard(name, call, "propose")
        if drafted is None and self.cache:
            self.cache.wipe_drafts()  # values that it wrote to the cache may not be finite
        return drafted

    def report(self, stats: RolloutStats) -> None:
        """Put failures and acceptance rates into the counters of a rollout."""
        watched = self.acceptance_rates
        stats.drafter_failures = self.failures
        stats.acceptance_rate = {name: seen.now for name, seen in watched.items() if seen.last}
        stats.alarms = {name: seen.now for name, seen in watched.items() if seen.alarming}

    def guard(self, name: str, call: Callable[[], T], what: str) -> T | None:
        """Return the result of `call`, which uses the drafter `name`. If `call` raises, drop the drafter and return
        None. `what` is the verb for the log, such as "propose"."""
        if name not in self.usable:
            return None
        try:
            return call()
        except Exception:
            log.exception("the drafter %s failed to %s; continuing without it", name, what)
            self.failures += 1
            del self.usable[name]
            return None

    def _call_all(self, call: Callable[[Drafter], None], what: str) -> None:
        for name, drafter in list(self.usable.items()):
            self.guard(name, partial(call, drafter), what)


def _copied(row: Row) -> tuple[Request, tuple[int, ...]]:
    """Return copies of a row's request and tokens for drafters. The request is copied without the data for rewards."""
    asked = row.request
    request = replace(asked, prompt=replace(asked.prompt, data={}), sampling=replace(asked.sampling))
    return request, tuple(row.tokens)


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


class Drafted(Protocol):
    """Rows that get drafts, with their noise and their positions in look-ahead drafts."""

    @property
    def rows(self) -> RowTable: ...
    @property
    def noise(self) -> NoiseWindow: ...
    @property
    def ahead(self) -> LookAhead: ...
    @property
    def target(self) -> Decoder: ...


def draft_rows(now: Round, rollout: Drafted, drafters: Drafters) -> list[Draft]:
    """Return a draft for each row, from its look-ahead draft if it has one, else from the strategy's drafter."""
    if now.strategy.depth == now.strategy.ahead == 0:
        return now.no_drafts()
    offers = look_ahead_offers(rollout) if now.strategy.ahead else [0] * len(now.rows)
    chains = rollout.ahead.propose([min(offer, now.strategy.ahead) for offer in offers])
    drafted = now.no_drafts() if all(chains) else _by_drafter(now, rollout, drafters, chains)
    return [Draft(chain, ahead=True) if chain else draft for chain, draft in zip(chains, drafted, strict=True)]


def look_ahead_offers(rollout: Drafted) -> list[int]:
    """Return for each row the number of look-ahead tokens that it can propose in this round."""
    rows, offers = rollout.rows, rollout.ahead.offers()
    if not any(offers):
        return offers
    longest = min(rollout.noise.width, most_new(len(rows), rollout.target.options.vocab_size)) - 1
    found = zip(rows, offers, strict=True)
    return [min(offer, longest, row.room - 1) if offer and row.finite else 0 for row, offer in found]


def _by_drafter(now: Round, rollout: Drafted, drafters: Drafters, chains: Sequence[Sequence[int]]) -> list[Draft]:
    """Return a draft for each row. A row gets draft tokens only if it has no look-ahead chain and the target's outputs
    for it were finite so far."""
    strategy, target = now.strategy, rollout.target
    drafter = drafters.usable.get(strategy.drafter)
    if drafter is None:
        return now.no_drafts()
    tokens, room = np.array(
        [(row.root, row.room * (row.finite and not chain)) for row, chain in zip(now.rows, chains, strict=True)]
    ).T
    roots = Roots(tokens, room, now.batch.stops, now.batch.for_drafters, target.device)
    noise = DraftNoise(rollout.noise, now.positions, strategy.depth)
    calibration = drafters.calibrations[strategy.drafter]
    drafts = drafters.propose(
        strategy.drafter, lambda: draft_chains(drafter, roots, strategy, noise, target.options.vocab_size, calibration)
    )
    return drafts or now.no_drafts()
