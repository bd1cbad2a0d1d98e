"""A run must learn from its rewards, and not from shuffled ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import load_script

learning = load_script(Path(__file__).parent.parent.parent / "bench" / "learning.py")


@pytest.mark.parametrize(
    ("shuffled", "rise", "held_out", "expected"),
    [
        (False, 0.1, 0.26, True),
        (False, 0.9, 0.24, False),
        (True, 0.9, 0.04, True),
        (True, 0.0, 0.06, False),
        (False, 0.21, None, True),
        (False, 0.19, None, False),
        (True, 0.19, None, True),
        (True, 0.21, None, False),
    ],
)
def test_held_out_prompts_decide_where_there_are_some(
    shuffled: bool, rise: float, held_out: float | None, expected: bool
) -> None:
    assert learning.holds(shuffled, rise, held_out) is expected
