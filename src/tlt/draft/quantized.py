"""Drafter for CPUs: the target itself with int8 weights. It needs no training, because its weights are the target's.

It attends to the target's own keys and values, so it has no cache of its own. The keys and values of its draft tokens
are written after the committed ones, where the target's next pass overwrites them. (Self-drafting with quantized
weights is from EfficientRollout, arXiv 2606.18967.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tlt.draft.drafter import Candidates, DraftCache, Level, Sources
from tlt.draft.features import FeatureView
from tlt.models.decoder import Decoder
from tlt.models.int8 import Int8Copy, can_quantize
from tlt.sampling import sampling_log_probs
from tlt.types import Request


class QuantizedDrafter:
    """Drafter of chains that runs the int8 copy of the target. The copy is made at the first draft."""

    name = "quantized"
    acceptance_rate: float | None = None

    def __init__(self, target: Decoder) -> None:
        self.target, self.copy = target, Int8Copy.of(target)

    def attach(self, cache: DraftCache) -> None:
        self.cache = cache

    def begin(self, window: FeatureView | None) -> None:
        self.copy.refresh(self.target)

    def open(self, request: Request, committed: Sequence[int]) -> None: ...

    def commit(self, row: int, tokens: Sequence[int]) -> None: ...

    def close(self, row: int, last: int) -> None: ...

    @torch.inference_mode()
    def predict(self, level: Level) -> Candidates:
        decoder = self.copy.decoder(self.target)
        positions, attend = self.cache.draft_pass(level.depth)
        positions = positions.clamp(max=decoder.options.max_positions - 1)  # a draft may exceed the last position
        hidden = decoder.forward(torch.from_numpy(level.tokens)[:, None], positions, attend)[:, 0]
        if not torch.isfinite(hidden[torch.from_numpy(level.alive)].sum()):
            raise ArithmeticError("the int8 copy of the model computed a value that is not finite")
        return Candidates(None, sampling_log_probs(decoder.logits(hidden), level.sampling)[0])


def make(sources: Sources) -> QuantizedDrafter | None:
    return QuantizedDrafter(sources.target) if can_quantize(sources.target) else None
