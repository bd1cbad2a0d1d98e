"""Grammar of messages."""

from __future__ import annotations

from tlt.wording import counted


def test_a_number_has_its_noun() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]
