"""The picture of learning curves has each value at its place."""

from __future__ import annotations

import re
from pathlib import Path

from tiny import load_script

curves = load_script(Path(__file__).parent.parent.parent / "bench" / "curves.py")


def test_a_run_of_two_steps_by_hand() -> None:
    picture = curves.drawn([{"seed": 0, "shuffled": True, "rewards": [0.0, 0.5], "held_out": {"0": 0.25, "2": 1.0}}])
    lines = re.findall(r'polyline points="([^"]+)"[^>]* stroke="(#\w+)"', picture)
    assert lines == [("60.0,276.0 390.0,166.0", "#8c959f"), ("60.0,221.0 720.0,56.0", "#8c959f")]
