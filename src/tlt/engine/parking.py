"""Rows of coming steps that were swapped out, with their keys and values in host memory.

They continue later, even after an update. Their keys and values are then those of an older target, so their tokens may
only be used as drafts. Recomputing the keys and values would cost about as much as decoding a third of the tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import Tensor

from tlt.draft.features import FeatureWindow, SavedEntries
from tlt.engine.kv_cache import KVCache
from tlt.types import Row

MOST_BYTES = 1 << 30  # of host memory for keys and values


class _Parked(NamedTuple):
    row: Row
    keys_values: Tensor
    entries: SavedEntries | None
    """Entries of its feature window"""


class Parking:
    """Swapped-out rows by seed, up to as many tokens as the cache may hold, and 1 GiB. The oldest are dropped first."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.tokens = cache, 0
        self.window: FeatureWindow | None = None
        self.bytes = 0
        self._parked: OrderedDict[int, _Parked] = OrderedDict()

    def begin(self, window: FeatureWindow | None) -> None:
        """Begin a new rollout, with its feature window."""
        self.window = window

    def park(self, place: int, row: Row) -> None:
        """Copy the keys and values of a row that is about to leave its place."""
        self.forget([row.request.seed])
        if not row.tokens:
            return
        keys_values = self.cache.read(place, row.kv_length)
        entries = self.window.save(place) if self.window else None
        self._parked[row.request.seed] = _Parked(row, keys_values, entries)
        self.tokens, self.bytes = self.tokens + row.kv_length, self.bytes + keys_values.nbytes
        while self.tokens > self.cache.bound_tokens or self.bytes > MOST_BYTES:
            self.forget([next(iter(self._parked))])

    def row(self, seed: int) -> Row | None:
        """Return the swapped-out row with this seed, if there is one."""
        return self._parked[seed].row if seed in self._parked else None

    def restore(self, place: int, row: Row) -> None:
        """Copy the keys and values of a row back to its new place."""
        parked = self._parked[row.request.seed]
        self.forget([row.request.seed])
        self.cache.write(place, parked.keys_values)
        if self.window and parked.entries:
            self.window.restore(place, parked.entries)

    def keep_only(self, seeds: Collection[int]) -> None:
        self.forget([seed for seed in self._parked if seed not in seeds])

    def forget(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            if parked := self._parked.pop(seed, None):
                self.tokens -= parked.row.kv_length
                self.bytes -= parked.keys_values.nbytes
