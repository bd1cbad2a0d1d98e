"""Numbers of a step that are computed from others."""

from __future__ import annotations

from typing import Any

import pytest

from tlt.metrics import _compared, first_and_last, useful_share
from tlt.trace import ABSENT, AHEAD, IDLE, ROLLOUT, SPOT, UPDATE


def rollout(**numbers: Any) -> dict[str, Any]:
    return {"draft_seconds": 0.0, "drafted": 0, "accepted": 0, "seen_ahead": 0, "ahead_tokens": 0} | numbers


@pytest.mark.parametrize(
    ("workers", "numbers", "expected"),
    [
        ([{ROLLOUT: 6.0, UPDATE: 4.0}], {}, 1.0),
        ([{ROLLOUT: 6.0, UPDATE: 2.0, IDLE: 2.0}], {}, 0.8),
        ([{ROLLOUT: 5.0, UPDATE: 5.0}, {ROLLOUT: 2.0, SPOT: 1.0, ABSENT: 2.0, UPDATE: 5.0}], {}, 0.85),
        # 4 s of drafting, a quarter of it accepted
        ([{ROLLOUT: 10.0}], {"draft_seconds": 4.0, "drafted": 100, "accepted": 25}, 0.7),
        # look-ahead: tokens of an earlier step may be accepted in this one, and count no more than all of this one
        ([{ROLLOUT: 6.0, AHEAD: 4.0}], {"seen_ahead": 50, "ahead_tokens": 200}, 0.7),
        ([{ROLLOUT: 6.0, AHEAD: 4.0}], {"seen_ahead": 50, "ahead_tokens": 10}, 1.0),
        ([], {}, 0.0),
    ],
)
def test_useful_share_by_hand(workers: list[dict[str, float]], numbers: dict[str, Any], expected: float) -> None:
    assert useful_share([(workers, rollout(**numbers))]) == pytest.approx(expected)


def test_useful_share_of_a_run_weighs_steps_by_their_seconds() -> None:
    steps = [([{ROLLOUT: 9.0, IDLE: 1.0}], rollout()), ([{ROLLOUT: 0.5, IDLE: 0.5}], rollout())]
    assert useful_share(steps) == pytest.approx(9.5 / 11)
    assert useful_share([([], {})]) == 0.0, "a line of an earlier version"


def test_compared_steps_are_summed() -> None:
    counts = {"tokens": 1, "responses": 1, "differ": 0}
    lines = [{"compared": counts, "seconds": {"rollout": 2.0, "compare": seconds}} for seconds in (4.0, 6.0)]
    seconds = {"rollout_seconds": 4.0, "plain_seconds": 10.0}
    assert _compared([*lines, {"seconds": {}}]) == {"steps": 2, "tokens": 2, "responses": 2, "differ": 0, **seconds}


def test_first_and_last_rewards_by_hand() -> None:
    """Eight steps of which the first has no reward show the three rewards that follow it."""
    assert first_and_last([0.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0]) == (0.75, 0.625, 4)
    assert first_and_last([1.0]) == (1.0, 1.0, 1)
    assert first_and_last([0.0, 0.0, 3.0]) == (0.0, 3.0, 1)
    assert first_and_last([float(i) for i in range(60)]) == (2.5, 56.5, 6)
