"""Learned and suffix guesses as one law: q = (1 - w) q_learned + w q_suffix, w by how long the suffix's match was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tlt.draft.drafter import Candidates, ComposedDrafter, Drafter, Level
from tlt.draft.features import FeatureView
from tlt.draft.suffix import SuffixDrafter
from tlt.types import Request

_WEIGHTS = np.array([0.0, 0.1, 0.3, 0.6])  # of the suffix's law, by its kind of match: none, 2, 4 or 8 tokens


class MixedDrafter(ComposedDrafter):
    """Both drafters are the engine's own, which tells them what happens: nothing is told here."""

    name = "mixed"

    def __init__(self, learned: Drafter, suffix: SuffixDrafter) -> None:
        self.learned, self.suffix = learned, suffix
        self.agreement = learned.agreement
        self.parts = frozenset({learned.name, suffix.name})

    def swapped(self, drafter: Drafter) -> bool:
        if drafter.name == self.learned.name:
            self.learned = drafter
        elif isinstance(drafter, SuffixDrafter):
            self.suffix = drafter
        return drafter.name in self.parts

    def begin(self, window: FeatureView | None) -> None: ...

    def open(self, request: Request, committed: Sequence[int]) -> None: ...

    def commit(self, row: int, tokens: Sequence[int]) -> None: ...

    def close(self, row: int, last: int) -> None: ...

    def predict(self, level: Level) -> Candidates:
        learned, suffix = self.learned.predict(level), self.suffix.predict(level)
        assert suffix.ids is not None, "the suffix drafter lists its candidates"
        assert suffix.classes is not None, "and says how long the matches were"
        q = learned.log_q.exp()
        ids, known = suffix.ids.to(q.device), suffix.log_q.to(q.device)
        weight = torch.tensor(_WEIGHTS[suffix.classes], dtype=q.dtype, device=q.device)[..., None]
        known = known.to(q.dtype).exp().masked_fill_(ids < 0, 0.0)
        q = q.mul_(1 - weight).scatter_add_(-1, ids.clamp(min=0), known * weight)
        return Candidates(None, q.log_(), suffix.classes)
