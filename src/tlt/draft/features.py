"""Hidden states of the target for the last tokens of each active row: the learned drafter's input and training data.

Shapes: R rows, C entries in a row's ring buffer, F size of a token's hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.models.device import to_device
from tlt.types import MAX_DRAFT_TOKENS, Row

# entries of a ring beyond the window, for draft tokens and for tokens committed before the ring is read
_SLACK = 2 * MAX_DRAFT_TOKENS
_GROWN = 16  # new tokens of a row between two checks for full windows; the ring buffer has room for them
_LAZY = 32  # number of writes that are put into the ring together, unless it is read earlier


class FeatureLayout(NamedTuple):
    """Choice of the target's hidden states to keep: those that enter the layers `taps` (hidden_states[i] in
    transformers), then the last one, after the final norm. They are kept for the last `window` tokens of each row."""

    taps: tuple[int, ...]
    window: int

    def width(self, hidden_size: int) -> int:
        return (len(self.taps) + 1) * hidden_size


class SavedEntries(NamedTuple):
    """Copy of a row's entries from position `first` on, in host memory: hidden states [M, F], and next tokens [M]."""

    first: int
    features: Tensor
    next_tokens: Tensor


class Harvest(NamedTuple):
    """Item of training data: n consecutive entries of one sequence (prompt and response). n is at most the window of
    `FeatureLayout`. An entry is a token position with the target's hidden states there."""

    target_version: int
    start: int
    """position of the first entry in the sequence: 0 is the first token of the prompt"""
    prompt_length: int
    tokens: Tensor
    """[n] token ids: for each entry, the token at the next position"""
    features: Tensor
    """[n, F] hidden states of the entries, laid out by `FeatureLayout`; the last one is after the final norm"""
    prompt_id: int = 0

    @property
    def drafted(self) -> int:
        """Number of entries whose draft token, two positions later, is in the response and in this item. Other entries
        are not trained on."""
        return max(0, self.start + len(self.tokens) - max(self.start, self.prompt_length - 2) - 1)

    @property
    def end(self) -> int:
        """Position in the sequence after the last entry."""
        return self.start + len(self.tokens)

    def cut(self, low: int, length: int) -> Harvest:
        """Return a part of this item: the entries [low, low + length), counted from its first entry."""
        part = slice(low, low + length)
        return self._replace(start=self.start + low, tokens=self.tokens[part], features=self.features[part])


class FeatureWindow:
    """Per-row store of hidden states. Entry p of a row has the hidden states of its token p, and the id of token p + 1.
    Entries [first, length) exist; the last `window` of them are used.

    Writes are collected and put into the ring buffer together, when it is read or after 32 writes. On a small model,
    writing each round's entries at once would take a tenth of the round.
    """

    def __init__(self, layout: FeatureLayout, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.window, self.device = layout, layout.window, device
        self.capacity = layout.window + _SLACK
        self._features = torch.zeros(0, self.capacity, layout.width(hidden_size), dtype=dtype, device=device)
        self._tokens = torch.zeros(0, self.capacity, dtype=torch.long, device=device)
        self._blocks: list[tuple[np.ndarray, Tensor, np.ndarray]] = []  # places, features, next tokens
        self.live = 0
        self.first: list[int] = []  # oldest entry of each active row, then of each free place
        self.length: list[int] = []

    def bytes_of(self, rows: int | None = None) -> int:
        """Return the bytes of `rows` rows (default: of the rows that exist)."""
        entries = self.capacity * (len(self._features) if rows is None else rows)
        return entries * (self._features.shape[-1] * self._features.itemsize + self._tokens.itemsize)

    def clear(self) -> None:
        """Drop all rows and keep the memory."""
        self._blocks, self.live, self.first, self.length = [], 0, [], []

    @property
    def features(self) -> Tensor:
        """Ring buffer of hidden states of each row, [R, C, F]: entry p is at index p modulo C."""
        self._flush()
        return self._features

    @property
    def tokens(self) -> Tensor:
        """Token that follows each entry, [R, C]."""
        self._flush()
        return self._tokens

    def append(self, row: Row, kept: int) -> None:
        place = self.live
        self.live += 1
        if place == len(self.first):
            self.first.append(0)
            self.length.append(0)
        if place == len(self._features):
            used = min(max(self.length), self.capacity)
            self._features, self._tokens = _grown(self._features, used), _grown(self._tokens, used)
        # the ring has only the last `capacity` entries of the row that was at this place before
        self.first[place] = min(max(self.first[place], self.length[place] - self.capacity), kept)
        self.length[place] = kept

    def remove(self, place: int, last: int) -> None:
        self._flush()
        if place != last:
            self.copy(last, place, self.length[last], self.first[last])
        self.live -= 1

    def copy(self, source: int, target: int, length: int, first: int = 0) -> None:
        """Copy entries [first, length) of row `source` to row `target`, as far back as `source` still has them."""
        self._flush()
        held = max(self.first[source], self.length[source] - self.capacity)
        used = min(length, self.capacity)  # later indices of the ring hold no entry below `length`
        self._features[target, :used] = self._features[source, :used]
        self._tokens[target, :used] = self._tokens[source, :used]
        self.first[target], self.length[target] = min(max(first, held), length), length

    def save(self, row: int) -> SavedEntries:
        """Return a copy, in host memory, of the row's entries in the window. `restore` writes them back."""
        first = self.start(row)
        features, next_tokens = self.read(row, first, self.length[row])
        return SavedEntries(first, features.cpu(), next_tokens.cpu())

    def restore(self, row: int, saved: SavedEntries) -> None:
        """Write the entries that `save` returned before the row left. `row` is its new place."""
        count = len(saved.next_tokens)
        self.first[row] = saved.first
        positions = range(saved.first, saved.first + count)
        self.write([row] * count, positions, saved.features.to(self.device), saved.next_tokens.tolist())

    def write(
        self,
        rows: Sequence[int] | np.ndarray,
        positions: Sequence[int] | np.ndarray,
        features: Tensor,
        next_tokens: Sequence[int] | np.ndarray,
    ) -> None:
        """Write entry `positions[m]` of row `rows[m]`, with positions ascending within a row. `features` [M, F] are the
        hidden states, which must not be changed afterwards. `next_tokens[m]` is the token after the entry."""
        row_of, position_of = np.array(rows), np.array(positions)
        for row, end in zip(row_of.tolist(), (position_of + 1).tolist(), strict=True):
            self.length[row] = end
        places = row_of * self.capacity + position_of % self.capacity
        self._blocks.append((places, features, np.array(next_tokens)))
        if len(self._blocks) >= _LAZY:
            self._flush()

    def _flush(self) -> None:
        """Put all collected writes into the ring buffer."""
        if not self._blocks:
            return
        blocks, self._blocks = self._blocks, []
        if len(blocks) == 1:
            return self._put(*blocks[0])
        places, features, next_tokens = zip(*blocks, strict=True)
        if len(np.unique(every := np.concatenate(places))) == len(every):
            self._put(every, torch.cat(features), np.concatenate(next_tokens))
        else:  # a row wrapped around its ring: the later entry must win
            for block in blocks:
                self._put(*block)

    def _put(self, places: np.ndarray, features: Tensor, next_tokens: np.ndarray) -> None:
        where, tokens = to_device(self.device, places, next_tokens)
        self._features.flatten(0, 1).index_copy_(0, where, features)
        self._tokens.view(-1).index_copy_(0, where, tokens)

    def start(self, row: int) -> int:
        """Return the position of the row's oldest entry in the window."""
        return max(self.first[row], self.length[row] - self.window)

    def read(self, row: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Return copies of a row's entries [low, high): hidden states [high - low, F] and next tokens [high - low]."""
        self._flush()
        begin, end = low % self.capacity, low % self.capacity + high - low
        around = max(0, end - self.capacity)
        rings = (self._features[row], self._tokens[row])
        if not around:
            return rings[0][begin:end].clone(), rings[1][begin:end].clone()
        return torch.cat([rings[0][begin:], rings[0][:around]]), torch.cat([rings[1][begin:], rings[1][:around]])


class FeatureView:
    """View of a `FeatureWindow` for drafters. Arrays are copies. Tensors are shared: drafters must not write to
    them."""

    def __init__(self, window: FeatureWindow) -> None:
        self._window = window
        self.layout, self.capacity = window.layout, window.capacity

    @property
    def features(self) -> Tensor:
        """Ring buffer of hidden states of each row, [R, C, F]: entry p is at index p modulo C."""
        return self._window.features

    @property
    def tokens(self) -> Tensor:
        """Token that follows each entry, [R, C]."""
        return self._window.tokens

    @property
    def starts(self) -> np.ndarray:
        """Position of the oldest entry in the window, for each active row."""
        return np.maximum(self._window.first[: self._window.live], self.lengths - self._window.window)

    @property
    def lengths(self) -> np.ndarray:
        return np.array(self._window.length[: self._window.live], dtype=np.int64)


def _grown(ring: Tensor, used: int) -> Tensor:
    """Return a copy of a ring buffer with room for more rows. Only the first `used` entries of a row are copied."""
    larger = ring.new_zeros(max(8, 2 * len(ring)), *ring.shape[1:])
    larger[: len(ring), :used] = ring[:, :used]
    return larger


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
