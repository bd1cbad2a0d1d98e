"""Store of the keys and values of finished turns, for the next turn of the same episode."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tlt.draft.features import FeatureWindow, SavedEntries
from tlt.engine.kv_cache import KVCache, Saved
from tlt.types import Row

_MOST_BYTES = 1 << 30  # limit of host memory for keys, values and hidden states


class _Kept(NamedTuple):
    context: tuple[int, ...]
    """tokens of the prompt and the response whose keys and values are kept"""
    saved: Saved
    entries: SavedEntries | None
    """entries of the row in the feature window; None if there is no window"""

    @property
    def bytes(self) -> int:
        return self.saved.values.nbytes + (self.entries.features.nbytes if self.entries else 0)


class TurnStore:
    """Per-row store. If a row leaves the batch and its episode may continue, its keys and values are copied to host
    memory. So are the hidden states that the drafter reads.

    If the copies take more than 1 GiB, the oldest ones are dropped. The store exists for one rollout, so the target's
    version does not change.
    """

    def __init__(self, cache: KVCache, window: FeatureWindow | None) -> None:
        self.cache, self.window, self.bytes = cache, window, 0
        self._rows: list[Row] = []
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by seed

    def append(self, row: Row, kept: int) -> None:
        self._rows.append(row)

    def remove(self, place: int, last: int) -> None:
        """Copy the row's keys and values if its episode may continue. The row table calls this store first, so they
        still exist."""
        row = self._rows[place]
        if row.request.sampling.continues and row.finite and row.tokens and not row.ahead:
            self._keep(place, row)
        self._rows[place] = self._rows[last]
        self._rows.pop()

    def _keep(self, place: int, row: Row) -> None:
        entries = self.window.save(place) if self.window else None
        kept = _Kept(row.context[:-1], self.cache.save(place, row.kv_length), entries)
        if row.request.seed in self._kept:
            self._drop(row.request.seed)
        self._kept[row.request.seed] = kept
        self.bytes += kept.bytes
        while self.bytes > _MOST_BYTES:
            self._drop(next(iter(self._kept)))

    def known(self, row: Row) -> int:
        """Return the number of the row's first tokens whose keys and values are stored."""
        kept = self._kept.get(row.request.seed)
        return len(kept.context) if kept and row.context[: len(kept.context)] == kept.context else 0

    def restore(self, place: int, row: Row) -> None:
        """Copy the row's stored keys and values to its new place, and drop the stored copy."""
        kept = self._drop(row.request.seed)
        self.cache.restore(place, kept.saved)
        if self.window and kept.entries:
            self.window.restore(place, kept.entries)

    def _drop(self, seed: int) -> _Kept:
        kept = self._kept.pop(seed)
        self.bytes -= kept.bytes
        return kept
