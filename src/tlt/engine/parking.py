"""Rows of coming steps that left the engine before they ended, with their keys and values, in host memory.

They go on from where they stood, after an update too. Their keys and values are then those of an older target, so that
nothing but a draft may come of such a row. To compute them anew costs about as much as decoding a third of the tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import Tensor

from tlt.draft.features import FeatureWindow
from tlt.engine.kv_cache import KVCache
from tlt.types import Row


class _Parked(NamedTuple):
    row: Row
    keys_values: Tensor
    first: int
    """of the entries that its feature window had"""
    features: tuple[Tensor, Tensor] | None


class Parking:
    """By seed, up to as many tokens as the cache may hold: those that were parked first go first."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.tokens = cache, 0
        self.window: FeatureWindow | None = None
        self._parked: OrderedDict[int, _Parked] = OrderedDict()

    def begin(self, window: FeatureWindow | None) -> None:
        """A new rollout, with its feature window."""
        self.window = window

    def park(self, place: int, row: Row) -> None:
        """The row is about to leave its place."""
        self.forget([row.request.seed])
        if not row.tokens:
            return
        first, features = 0, None
        if self.window:
            first = self.window.start(place)
            features = self.window.read(place, first, self.window.length[place])
            features = features[0].cpu(), features[1].cpu()
        keys_values = self.cache.read(place, row.kv_length)
        self._parked[row.request.seed] = _Parked(row, keys_values, first, features)
        self.tokens += row.kv_length
        while self.tokens > self.cache.bound_tokens:
            self.forget([next(iter(self._parked))])

    def row(self, seed: int) -> Row | None:
        """One that is parked."""
        return self._parked[seed].row if seed in self._parked else None

    def restore(self, place: int, row: Row) -> None:
        """The row has just taken this place."""
        parked = self._parked[row.request.seed]
        self.forget([row.request.seed])
        self.cache.write(place, parked.keys_values)
        if self.window and parked.features:
            self.window.restore(place, parked.first, *parked.features)

    def keep_only(self, seeds: Collection[int]) -> None:
        self.forget([seed for seed in self._parked if seed not in seeds])

    def forget(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            if parked := self._parked.pop(seed, None):
                self.tokens -= parked.row.kv_length
