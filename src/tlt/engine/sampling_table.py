"""Sampling parameters and stop tokens of the active rows, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.sampling import SamplingTensors
from tlt.types import Request, Row, SamplingParams


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
    seeds: Tensor
    """[B] seeds of the requests, as int64"""


class SamplingTable:
    """Per-row store of sampling parameters. The arrays are rebuilt only when rows were added or removed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._requests: list[Request] = []
        self._batch: BatchSampling | None = None

    def append(self, row: Row, kept: int) -> None:
        self._requests.append(row.request)
        self._batch = None

    def remove(self, place: int, last: int) -> None:
        self._requests[place] = self._requests[last]
        self._requests.pop()
        self._batch = None

    @property
    def batch(self) -> BatchSampling:
        if self._batch is None:
            params = [request.sampling for request in self._requests]
            stops = [one.stop_token_ids for one in params]
            most = max(1, max(len(s) for s in stops))
            padded = np.array([[*s, *[-1] * (most - len(s))] for s in stops])
            sampling, for_drafters = (sampling_tensors(params, self.device) for _ in range(2))
            seeds = (
                torch.tensor([request.seed for request in self._requests], dtype=torch.uint64)
                .view(torch.int64)
                .to(self.device)
            )
            self._batch = BatchSampling(sampling, for_drafters, padded, seeds)
        return self._batch
