"""Sampling parameters and stop tokens of the active rows, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tlt.sampling import SamplingTensors
from tlt.types import Row, SamplingParams


def sampling_tensors(params: Sequence[SamplingParams], device: torch.device) -> SamplingTensors:
    numbers = [[p.temperature for p in params], [p.top_k for p in params], [p.top_p for p in params]]
    temperature, top_k, top_p = torch.tensor(numbers, dtype=torch.float64, device=device)
    return SamplingTensors(
        temperature,
        top_k.long(),
        top_p,
        restricted=any(p.top_k > 0 or p.top_p < 1 for p in params),
        tempered=any(p.temperature != 1 for p in params),
        greedy=any(p.temperature == 0 for p in params),
    )


class BatchSampling(NamedTuple):
    """Sampling parameters and stop tokens of all active rows."""

    sampling: SamplingTensors
    for_drafters: SamplingTensors
    """copy of `sampling` for drafters; a drafter that changes this copy changes no token"""
    stops: np.ndarray
    """[B, S] stop tokens, padded with -1"""


class SamplingTable:
    """Per-row store of sampling parameters. The arrays are rebuilt only when rows were added or removed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._params: list[SamplingParams] = []
        self._batch: BatchSampling | None = None

    def append(self, row: Row, kept: int) -> None:
        self._params.append(row.request.sampling)
        self._batch = None

    def remove(self, place: int, last: int) -> None:
        self._params[place] = self._params[last]
        self._params.pop()
        self._batch = None

    @property
    def batch(self) -> BatchSampling:
        if self._batch is None:
            stops = [params.stop_token_ids for params in self._params]
            most = max(1, max(len(s) for s in stops))
            padded = np.array([[*s, *[-1] * (most - len(s))] for s in stops])
            sampling, for_drafters = (sampling_tensors(self._params, self.device) for _ in range(2))
            self._batch = BatchSampling(sampling, for_drafters, padded)
        return self._batch
