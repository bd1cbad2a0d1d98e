"""Collection of training data for the drafter: hidden states that the rollout computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np
from torch import Tensor

from tlt.draft.features import FeatureWindow, Harvest
from tlt.host import to_device
from tlt.types import Row

_GROWN = 16  # new tokens of a row between two checks for full windows; the ring buffer has room for them


class Harvester:
    """Writer of each round's hidden states to `window`, the feature window, from which drafters read them.

    Whenever a row has `window.window` new entries, they are passed to `give` as an item of training data. If a row
    finishes, its last `window.window` entries are passed too. If `give` is None, no training data are collected.
    `version` is the target version.
    """

    def __init__(self, window: FeatureWindow, version: int, give: Callable[[Harvest], None] | None) -> None:
        self.window, self.version, self.give = window, version, give
        self._grown = 0

    def write(self, features: Tensor, entries: np.ndarray, grown: int) -> None:
        """Write the hidden states `features` [B, N, F] of a pass. `entries` [4, M] has the root and each accepted
        token: the row's place, the index in the pass, the position, and the next token. `grown` is the largest number
        of tokens that a row committed."""
        places, indices, positions, following = entries
        if features.shape[1] == 1:  # plain decoding commits one token of every row, in their order
            kept = features[:, 0]
        else:
            row, index = to_device(features.device, places, indices)
            kept = features[row, index]
        self.window.write(places, positions, kept, following)
        self._grown += grown

    def collect(self, rows: Iterable[Row], finished: Collection[int]) -> None:
        """Call `give` with each full window of new entries, and with the last window of each row that ends in this
        round. `finished`: places of the rows that end."""
        if not finished and self._grown < _GROWN:
            return
        self._grown = 0
        if self.give is None:
            return
        size = self.window.window
        for place, row in enumerate(rows):
            if not row.finite or row.ahead:  # its hidden states are not finite, or it is decoded again in its own step
                continue
            low, length = max(row.harvested, self.window.first[place]), self.window.length[place]
            while length - low >= size:
                self._give(row, place, low, low + size)
                low += size
            if place in finished and low < length:
                first = len(row.request.prompt.token_ids) + row.turn - 1 if row.replies else 0  # after the last reply
                self._give(row, place, max(first, self.window.start(place)), length)

    def _give(self, row: Row, place: int, low: int, high: int) -> None:
        assert self.give is not None, "`collect` has checked it"
        features, tokens = (part.cpu() for part in self.window.read(place, low, high))
        row.harvested = high
        prompt = row.request.prompt
        true = row.context[low + 1 : high + 1]
        if tokens.tolist() == list(true) and features.isfinite().all():  # else a drafter wrote into the window
            self.give(Harvest(self.version, low, len(prompt.token_ids), tokens, features, prompt.prompt_id))
