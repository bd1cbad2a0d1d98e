"""Each live row's noise, computed a window of positions at a time and kept until its position is committed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt.sampling import gumbel_noise

_WINDOW_BYTES = 64 * 2**20
_MAX_WINDOW = 64
_LEAST_WINDOW = 16
_LEAST_CALL = 32  # positions that a call fills at least: on a CPU it costs as much as twenty of them to begin


class NoiseWindow:
    """A ring of W positions for each of R rows: [R, W, V]; position t lies at t mod W. Rows follow the scheduler's
    order."""

    def __init__(self, max_rows: int, vocab_size: int, max_depth: int, device: torch.device) -> None:
        affordable = _WINDOW_BYTES // (max_rows * vocab_size * 4)
        self.width = max(max_depth + 1, min(_MAX_WINDOW, affordable))
        self.vocab_size, self.device = vocab_size, device
        self.ring = torch.zeros(0, self.width, vocab_size, device=device)
        self.seeds: list[int] = []
        self.ends: list[int] = []  # no row needs a position from here on
        self.ready: list[int] = []  # positions below this one are in the ring

    def append(self, seed: int, position: int, end: int) -> None:
        self.seeds.append(seed)
        self.ends.append(end)
        self.ready.append(position)
        if len(self.seeds) > len(self.ring):
            more = torch.zeros(max(8, len(self.ring)), self.width, self.vocab_size, device=self.device)
            self.ring = torch.cat([self.ring, more])

    def remove(self, row: int) -> None:
        """The last row takes the place of the removed one."""
        last = len(self.seeds) - 1
        self.ring[row] = self.ring[last]
        for per_row in (self.seeds, self.ends, self.ready):
            per_row[row] = per_row[last]
            per_row.pop()

    @torch.inference_mode()
    def prepare(self, positions: Sequence[int], depth: int) -> None:
        """Have positions[b] .. positions[b] + depth of every row. When one is short, all look ahead, in one call; the
        longer a response is, the further, as short ones would not use it."""
        rows = list(zip(self.ready, positions, self.ends, strict=True))
        if all(ready >= min(at + depth + 1, end) for ready, at, end in rows):
            return
        least = max(_LEAST_WINDOW, _LEAST_CALL // len(rows))
        ahead = [
            min(at + max(depth + 1, min(self.width, max(at, least))), end)
            for at, end in zip(positions, self.ends, strict=True)
        ]
        self.ready, before = [max(a, r) for a, r in zip(ahead, self.ready, strict=True)], self.ready
        fill = [(row, t) for row, at in enumerate(positions) for t in range(max(before[row], at), self.ready[row])]
        row, time = (torch.tensor(x, device=self.device) for x in zip(*fill, strict=True))
        seeds = torch.tensor(self.seeds, dtype=torch.uint64).view(torch.int64).to(self.device)
        self.ring[row, time % self.width] = gumbel_noise(seeds[row], time, self.vocab_size)

    def at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Noise [..., V] of (row, position) index tensors that broadcast together."""
        return self.ring[rows, positions % self.width]

    def at_ids(self, rows: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        """Noise of (row, position, token id) index tensors that broadcast together; an id out of range gets some id's
        noise."""
        return self.ring[rows, positions % self.width, ids.clamp(0, self.vocab_size - 1)]
