"""The estimate of a rollout's speed against plain decoding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlt.draft.chains import Draft
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.state import Round, compare_with_plain
from tlt.types import RolloutStats

NONE = [Draft()]
DRAFTS = [Draft([2])]


def plain_seconds(rows: int, context: float) -> float:
    """Return 1 s for each row."""
    return float(rows)


def round_of(strategy: Strategy, ahead: list[bool]) -> Round:
    rows: Any = tuple(SimpleNamespace(ahead=each) for each in ahead)
    batch: Any = None
    return Round(strategy, rows, [0] * len(rows), torch.zeros(len(rows)), batch)


SUFFIX = Strategy("suffix", 4)
NOW, COMING = False, True  # whether a row is of a coming step
CASES: dict[str, tuple[Strategy, list[bool], float, list[int], Any, float | None]] = {
    # a round of 2 rows takes 2 s by the measurements; other work makes the rounds of this rollout faster or slower
    "a plain round is its own estimate": (PLAIN, [NOW, NOW], 7.3, [1, 1], NONE, 7.3),
    "plain decoding would have had 2 of these 3 rows": (PLAIN, [NOW, COMING, NOW], 6.0, [1, 1, 1], NONE, 4.0),
    "5 tokens of 2 rows need 2.5 plain rounds of 2 s": (SUFFIX, [NOW, NOW], 4.0, [3, 2], DRAFTS, 5.0),
    "a fast round without proposals gains nothing": (SUFFIX, [NOW, NOW], 1.5, [1, 1], NONE, 1.5),
    "what a slow round takes beyond 2 s is the drafter's": (SUFFIX, [NOW, NOW], 4.0, [1, 1], NONE, 2.0),
    "3 tokens of this rollout's only row need 3 rounds of 1 s": (SUFFIX, [COMING, NOW], 4.0, [9, 3], DRAFTS, 3.0),
    "a round without a row of this rollout does not count": (SUFFIX, [COMING, COMING], 4.0, [9, 9], DRAFTS, None),
}


@pytest.mark.parametrize("case", CASES)
def test_seconds_of_rounds_and_of_plain_decoding_for_the_same_tokens(case: str) -> None:
    strategy, ahead, seconds, tokens, drafts, plain = CASES[case]
    stats = RolloutStats()
    for _ in range(2):
        compare_with_plain(stats, plain_seconds, round_of(strategy, ahead), seconds, tokens, 10.0, drafts)
    expected = {} if plain is None else {"seconds": 2 * seconds, "plain_seconds": pytest.approx(2 * plain)}
    assert stats.against_plain == expected
