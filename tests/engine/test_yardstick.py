"""What plain decoding would have taken, against a made-up machine on which it is known."""

from __future__ import annotations

import random

import pytest

from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.yardstick import Yardstick

DRAFTED = Strategy("suffix", 6, 1, 7)


def seconds_of(strategy: Strategy, rows: int) -> float:
    """A round's: a pass costs a part by itself and a part by its tokens."""
    return 0.01 + 0.0005 * rows * strategy.nodes


def play(rounds: list[int], each: int, chosen: Strategy = DRAFTED) -> tuple[Yardstick, dict[Strategy, int], float]:
    """Rounds of so many rows, `each` token a row where they are drafted; what was done, and what plain decoding takes
    for the same tokens."""
    yardstick, counts, plain = Yardstick(), dict[Strategy, int](), 0.0
    yardstick.begin()
    for rows in rounds:
        strategy = yardstick.choose(chosen, rows)
        counts[strategy] = counts.get(strategy, 0) + 1
        tokens = [1 if strategy == PLAIN else each] * rows
        yardstick.record(strategy, seconds_of(strategy, rows), tokens)
        if yardstick.measured["seconds"]:
            plain += seconds_of(PLAIN, rows) * sum(tokens) / rows
    return yardstick, counts, plain


@pytest.mark.parametrize("each", [1, 3])
def test_it_finds_what_plain_decoding_takes_as_rows_become_fewer(each: int) -> None:
    rows = [r for r in (64, 33, 16, 7, 3, 1) for _ in range(400)]
    yardstick, counts, plain = play(rows, each)
    assert yardstick.measured["plain_seconds"] == pytest.approx(plain, rel=0.02)
    assert counts[PLAIN] <= 3 * 6, "of 400 rounds of each size the second, the 202nd, and perhaps another"
    assert yardstick.measured["plain_rounds"] == counts[PLAIN]
    spent = sum(seconds_of(DRAFTED, r) for r in rows)
    assert yardstick.measured["seconds"] == pytest.approx(spent, rel=0.05)


def test_rows_in_any_order_and_rollouts_in_a_row_change_little() -> None:
    mixed = random.Random(0)
    rows = [mixed.randint(1, 64) for _ in range(4000)]
    yardstick, _, plain = play(rows, 2)
    assert yardstick.measured["plain_seconds"] == pytest.approx(plain, rel=0.1)
    yardstick.begin()
    assert yardstick.measured["seconds"] == 0.0
    yardstick.record(DRAFTED, 1.0, [2] * 8)
    assert yardstick.measured["plain_seconds"] == pytest.approx(2 * seconds_of(PLAIN, 8), rel=0.1), "it remembers"


def test_what_is_plain_already_is_as_fast_as_plain_and_costs_nothing() -> None:
    yardstick, counts, _ = play([4] * 500, 1, PLAIN)
    assert counts == {PLAIN: 500}
    assert yardstick.measured["plain_seconds"] == pytest.approx(yardstick.measured["seconds"])


def test_nothing_is_said_before_a_plain_round() -> None:
    yardstick, _, _ = play([4], 3)
    assert yardstick.measured == {"seconds": 0.0, "plain_seconds": 0.0, "plain_rounds": 0.0}


def test_rows_of_coming_steps_cost_what_they_cost_and_give_nothing() -> None:
    yardstick, _, _ = play([2] * 10, 1, PLAIN)
    yardstick.begin()
    found = yardstick.record(DRAFTED, 1.0, [3, 5, 9, 9], [False, False, True, True])
    assert found["seconds"] == 1.0
    assert found["plain_seconds"] == pytest.approx(seconds_of(PLAIN, 2) * 8 / 2)
    assert yardstick.record(PLAIN, 9.0, [1, 1], [False, True])["plain_rounds"] == 0.0, "it says nothing of two rows"
