"""The estimate of a rollout's speed against plain decoding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.state import Round, compare_with_plain
from tlt.types import RolloutStats

ROOTS: Any = [SimpleNamespace(tokens=[1])]
DRAFTS: Any = [SimpleNamespace(tokens=[1, 2])]


def plain_seconds(rows: int, context: float) -> float:
    """Return 1 s for each row."""
    return float(rows)


def round_of(strategy: Strategy, ahead: list[bool]) -> Round:
    rows: Any = tuple(SimpleNamespace(ahead=each) for each in ahead)
    batch: Any = None
    return Round(strategy, rows, [0] * len(rows), torch.zeros(len(rows)), batch)


def test_a_plain_round_is_its_own_estimate() -> None:
    """Rounds of 2 rows take 2 s by the measurements. Other work makes the rounds of this rollout faster or slower."""
    stats = RolloutStats()
    for seconds in (1.4, 2.0, 7.3):
        compare_with_plain(stats, plain_seconds, round_of(PLAIN, [False, False]), seconds, [1, 1], 10.0, ROOTS)
    assert stats.against_plain["plain_seconds"] == stats.against_plain["seconds"] == pytest.approx(10.7)


def test_rows_of_coming_steps_cost_time_in_a_plain_round() -> None:
    """2 of 3 rows are of this rollout, so plain decoding would have taken two thirds of the time."""
    stats = RolloutStats()
    compare_with_plain(stats, plain_seconds, round_of(PLAIN, [False, True, False]), 6.0, [1, 1, 1], 10.0, ROOTS)
    assert stats.against_plain == {"seconds": 6.0, "plain_seconds": pytest.approx(4.0)}


SUFFIX = Strategy("suffix", 4, 1, 5)


def test_a_round_with_drafts_is_compared_with_measured_plain_rounds() -> None:
    """2 rows commit 3 and 2 tokens. Plain decoding would need 2.5 rounds of 2 s on average."""
    stats = RolloutStats()
    compare_with_plain(stats, plain_seconds, round_of(SUFFIX, [False, False]), 4.0, [3, 2], 10.0, DRAFTS)
    assert stats.against_plain == {"seconds": 4.0, "plain_seconds": pytest.approx(5.0)}


@pytest.mark.parametrize(("seconds", "plain"), [(1.5, 1.5), (4.0, 2.0)])
def test_a_round_without_proposals_gains_nothing(seconds: float, plain: float) -> None:
    """A round of 2 rows takes 2 s by the measurements. The rest of 4 s is the drafter's."""
    stats = RolloutStats()
    compare_with_plain(stats, plain_seconds, round_of(SUFFIX, [False, False]), seconds, [1, 1], 10.0, ROOTS)
    assert stats.against_plain == {"seconds": seconds, "plain_seconds": pytest.approx(plain)}


def test_rows_of_coming_steps_do_not_count_in_a_round_with_drafts() -> None:
    """The only row of this rollout commits 3 tokens, for which plain decoding needs 3 rounds of 1 s."""
    stats = RolloutStats()
    compare_with_plain(stats, plain_seconds, round_of(SUFFIX, [True, False]), 4.0, [9, 3], 10.0, DRAFTS)
    compare_with_plain(stats, plain_seconds, round_of(SUFFIX, [True, True]), 4.0, [9, 9], 10.0, DRAFTS)
    assert stats.against_plain == {"seconds": 4.0, "plain_seconds": pytest.approx(3.0)}
