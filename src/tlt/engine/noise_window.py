"""Sampling noise of each active row, computed for several positions at a time and kept until they are committed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tlt.models.device import to_device
from tlt.sampling import gumbel_noise
from tlt.types import Row

_WINDOW_BYTES = 256 * 2**20  # for 64 rows and 49,152 token ids: 21 positions, so look-ahead chains of 20 tokens
_MAX_WINDOW = 64  # largest width of the ring in positions
_LEAST_CALL = 2**17  # least number of values to compute in a call; on a CPU, a call itself costs as much as 2^14 values


class NoiseWindow:
    """Per-row store of noise, [R, W, V]: a ring buffer of W positions for each of R rows. Position t is at index t mod
    W. A greedy row has zero noise, for draft tokens and for the target's tokens."""

    def __init__(self, max_rows: int, vocab_size: int, max_depth: int, device: torch.device) -> None:
        affordable = _WINDOW_BYTES // (max_rows * vocab_size * 4)
        self.width = max(max_depth + 1, min(_MAX_WINDOW, affordable))
        self.vocab_size, self.device = vocab_size, device
        self.ring = torch.zeros(0, self.width, vocab_size, device=device)
        self.seeds: list[int] = []
        self.ends: list[int] = []  # first position whose noise is not needed
        self.ready: list[int] = []  # positions below this one are in the ring

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's noise."""
        return self.width * self.vocab_size * self.ring.itemsize

    @torch.inference_mode()
    def append(self, row: Row, kept: int) -> None:
        params, place = row.request.sampling, len(self.seeds)
        self.seeds.append(row.request.seed)
        self.ends.append(params.max_new_tokens)
        self.ready.append(len(row.tokens) if params.temperature > 0 else params.max_new_tokens)
        if params.temperature == 0:
            self.ring[place : place + 1] = 0  # if the ring has the place already

    @torch.inference_mode()
    def remove(self, place: int, last: int) -> None:
        if place != last:
            self.ring[place : place + 1] = self.ring[last] if last < len(self.ring) else 0
        for per_row in (self.seeds, self.ends, self.ready):
            per_row[place] = per_row[last]
            per_row.pop()

    def release(self) -> None:
        """Free the memory of the noise, after a rollout."""
        self.ring = self.ring.new_zeros(0, *self.ring.shape[1:])

    @torch.inference_mode()
    def prepare(self, positions: Sequence[int], depth: int) -> None:
        """Ensure that the ring has the noise of positions[b] .. positions[b] + depth of every row b. If a position of
        one row is missing, the noise of all rows is computed in one call. With a small vocabulary, later positions are
        computed too, so that calls are few. With a depth of -1 no noise is needed."""
        if depth < 0:
            return
        if len(self.seeds) > len(self.ring):  # grown once for all new rows: a copy may take as long as two rounds
            grown = torch.zeros(2 ** (len(self.seeds) - 1).bit_length(), *self.ring.shape[1:], device=self.device)
            grown[: len(self.ring)] = self.ring
            self.ring = grown
        at, ends, before = np.array(positions), np.array(self.ends), np.array(self.ready)
        if (before >= np.minimum(at + depth + 1, ends)).all():
            return
        fill = max(depth + 1, min(self.width, _LEAST_CALL // (len(at) * self.vocab_size)))
        ready = np.maximum(before, np.minimum(at + fill, ends))
        self.ready = ready.tolist()
        first = np.maximum(before, at)
        counts = ready - first
        rows = np.repeat(np.arange(len(at)), counts)
        times = np.arange(len(rows)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        seeds = np.array(self.seeds, dtype=np.uint64).view(np.int64)[rows]
        row, time, seed = to_device(self.device, rows, times, seeds)
        self.ring[row, time % self.width] = gumbel_noise(seed, time, self.vocab_size)

    def at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return noise [..., V] for tensors of row and position indices that broadcast together."""
        return self.ring[rows, positions % self.width]

    def at_ids(self, rows: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        """Return noise for tensors of row indices, positions and token ids that broadcast together. An id outside the
        vocabulary gets the noise of another id."""
        return self.ring[rows, positions % self.width, ids.clamp(0, self.vocab_size - 1)]


class DraftNoise:
    """Noise for the drafts of one round. `positions` [B] are the positions of the rows' next tokens, and `depth` is the
    maximum number of draft tokens."""

    def __init__(self, window: NoiseWindow, positions: Tensor, depth: int) -> None:
        self.window, self.positions, self.depth = window, positions, depth
        self.rows = torch.arange(len(positions), device=positions.device)
        self._whole: Tensor | None = None

    def __call__(self, depth: int, ids: Tensor | None) -> Tensor:
        """Return the noise at each row's next position + `depth`: [B, K] for token ids `ids` [B, K], or [B, V] for the
        whole vocabulary if `ids` is None."""
        if ids is not None:
            return self.window.at_ids(self.rows[:, None], (self.positions + depth)[:, None], ids)
        if self._whole is None:  # for all depths at once, because that costs as much as for one
            depths = torch.arange(max(1, self.depth), device=self.positions.device)
            self._whole = self.window.at(self.rows[:, None], self.positions[:, None] + depths)
        return self._whole[:, depth]
