"""Expected number of decoding rounds that a drafter needs for known tokens. Drafters are compared by this number.

The mean accept length of chains that begin at all entries (token positions) is no substitute, because it is higher than
the mean accept length of real rounds. A round begins after a rejected draft token, where drafting is harder. A part
that is easy to draft has many entries and few rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def expected_rounds(right: Tensor, segments: Tensor) -> tuple[float, float]:
    """Return the expected number of rounds that decode n entries (token positions), and the expected number of these
    rounds whose first draft token is accepted.

    right: [n, K] for the chain that begins at each entry, the probability that draft token k is accepted if all draft
    tokens before it are. segments: [n] id of the sequence of each entry; entries of a sequence are consecutive. A round
    begins at the first entry of each sequence. The last round of a sequence counts by the fraction of its tokens that
    are among these entries.
    """
    ids = segments.tolist()
    edges = [0, *(i for i, (a, b) in enumerate(pairwise(ids), start=1) if a != b), len(ids)]
    reached = torch.nn.functional.pad(right.double().cumprod(1), (1, 1))
    reached[:, 0] = 1.0
    exactly = (reached[:, :-1] - reached[:, 1:]).tolist()  # [n, K + 1] probability of exactly k accepted draft tokens
    firsts = right[:, 0].tolist()
    found = [_of_sequence(exactly[low:high], firsts[low:high]) for low, high in pairwise(edges) if high > low]
    return sum(rounds for rounds, _ in found), sum(first for _, first in found)


def _of_sequence(exactly: Sequence[Sequence[float]], firsts: Sequence[float]) -> tuple[float, float]:
    n, rounds, first = len(exactly), 0.0, 0.0
    begins = [1.0] + [0.0] * (n - 1)  # probability that a round begins at an entry
    for i, chances in enumerate(exactly):
        share = 0.0  # expected fraction of a round's tokens that are among these entries
        for k, chance in enumerate(chances):
            share += chance * min(1.0, (n - i) / (k + 1))
            if i + k + 1 < n:
                begins[i + k + 1] += begins[i] * chance
        rounds += begins[i] * share
        first += begins[i] * share * firsts[i]
    return rounds, first
