"""How many rounds chains of guesses would take for what is known already: so what a drafter is worth in decoding.

The mean over all entries of what a chain from there would commit is more than rounds commit: a round begins behind a
guess that was wrong, where guesses are harder, and a stretch that is drafted well is passed in few rounds however many
entries it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def expected_rounds(right: Tensor, segments: Tensor) -> tuple[float, float]:
    """Rounds until these entries are decoded, and how often the first guess of one is right, summed over them.

    right: [n, K] the chance that guess k of a chain from an entry is right if those before it are. segments: [n] equal
    for consecutive entries of one sequence, of which the first begins a round. What the last round of a sequence
    commits beyond these entries is not counted.
    """
    ids = segments.tolist()
    edges = [0, *(i for i, (a, b) in enumerate(pairwise(ids), start=1) if a != b), len(ids)]
    reached = torch.nn.functional.pad(right.double().cumprod(1), (1, 1))
    reached[:, 0] = 1.0
    exactly = (reached[:, :-1] - reached[:, 1:]).tolist()  # [n, K + 1] the chance of so many right ones
    firsts = right[:, 0].tolist()
    found = [_of_sequence(exactly[low:high], firsts[low:high]) for low, high in pairwise(edges) if high > low]
    return sum(rounds for rounds, _ in found), sum(first for _, first in found)


def _of_sequence(exactly: Sequence[Sequence[float]], firsts: Sequence[float]) -> tuple[float, float]:
    n, rounds, first = len(exactly), 0.0, 0.0
    begins = [1.0] + [0.0] * (n - 1)  # the chance that a round begins at an entry
    for i, chances in enumerate(exactly):
        share = 0.0  # of what a round from here commits, that is within these entries
        for k, chance in enumerate(chances):
            share += chance * min(1.0, (n - i) / (k + 1))
            if i + k + 1 < n:
                begins[i + k + 1] += begins[i] * chance
        rounds += begins[i] * share
        first += begins[i] * share * firsts[i]
    return rounds, first
