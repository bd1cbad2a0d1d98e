"""Acceptance rates of draft tokens by level, counted over all rounds of a drafter. The tuner predicts tokens from them.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

_DEEPEST = 64  # levels of a draft whose acceptance is counted
_KEPT = 1 - 1 / 64  # weight of earlier rounds in the acceptance rates, from one round to the next
_PRIOR_ROWS = 2  # weight, in rows, of the acceptance rate that is assumed before any round
_ROWS_OF_EVALUATION = 8  # weight, in rows, of the acceptance rate that a new drafter had on held-out data

Source = tuple[str, int]
"""(drafter, branching): draft tokens that are counted together"""


class AcceptanceModel:
    """Acceptance rate at each level: the probability that a draft token is accepted if all tokens before it are. It is
    the Kaplan-Meier estimate: a chain that was accepted to its end gives no information about later levels. So chains
    of all depths are combined. Older rounds have smaller weights."""

    def __init__(self) -> None:
        self.seen: dict[Source, np.ndarray] = {}
        """counts per source, [_DEEPEST, 2]: rows that reached each level, and rows whose token there was accepted"""

    def age(self) -> None:
        """Reduce the weight of all earlier rounds. This is called after every round, whichever drafter it used."""
        for levels in self.seen.values():
            levels *= _KEPT

    def add(self, source: Source, depths: Sequence[int], tokens: Sequence[int]) -> None:
        """Add the rows of a round. Row i drafted `depths[i]` tokens and committed `tokens[i]`, bonus token included."""
        drafted = np.array(depths)[:, None]
        right, level = np.minimum(np.array(tokens)[:, None] - 1, drafted), np.arange(_DEEPEST)
        levels = self.seen.setdefault(source, np.zeros((_DEEPEST, 2)))
        levels[:, 0] += (level <= np.minimum(right, drafted - 1)).sum(0)
        levels[:, 1] += (level < right).sum(0)

    def chances(self, source: Source, depth: int, prior: Sequence[float]) -> list[float]:
        """Return the acceptance rates of the first `depth` levels. `prior[level]` counts like 2 rows. For levels beyond
        the given priors, the prior is the rate of the level before."""
        seen, found = self.seen.get(source), list[float]()
        for level in range(depth):
            reached, right = seen[level].tolist() if seen is not None else (0.0, 0.0)
            expected = prior[level] if level < len(prior) else found[-1]
            found.append((right + _PRIOR_ROWS * expected) / (reached + _PRIOR_ROWS))
        return found

    def assume(self, drafter: str, chance: float) -> None:
        """Set the counts as if 8 rows had been drafted as chains, with acceptance rate `chance` at each level."""
        reached = _ROWS_OF_EVALUATION * chance ** np.arange(_DEEPEST)
        self.seen[drafter, 1] = np.stack([reached, reached * chance], axis=1)

    def forget(self, drafter: str) -> None:
        self.seen = {source: levels for source, levels in self.seen.items() if source[0] != drafter}

    def state(self) -> list[Any]:
        """Return the counts as plain data for a checkpoint."""
        return [[*source, levels[levels[:, 0] > 0].tolist()] for source, levels in self.seen.items()]

    def load_state(self, state: Iterable[Any], drafters: Collection[str]) -> None:
        """Load the counts that `state` returned, for these drafters only."""
        for drafter, branching, levels in state:
            if drafter in drafters:
                seen = self.seen[drafter, branching] = np.zeros((_DEEPEST, 2))
                seen[: len(levels)] = np.array(levels[:_DEEPEST]).reshape(-1, 2)
