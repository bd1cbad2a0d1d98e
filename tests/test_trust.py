"""Checks that the tests named in docs/trust.md exist."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from tlt.types import Prompt

ROOT = Path(__file__).parent.parent


def test_every_test_named_on_the_page_exists() -> None:
    rows = [line for line in (ROOT / "docs" / "trust.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    named = [re.search(r"`(tests/\S+\.py)::(\w+)` \|$", row) for row in rows if not row.startswith("| risk ")]
    assert named
    assert all(named)
    for found in filter(None, named):
        source = (ROOT / found[1]).read_text(encoding="utf-8")
        assert f"def {found[2]}(" in source, found[0]


def test_the_readme_shows_a_reward_that_reads_a_column() -> None:
    (shown,) = re.findall(r"(?m)^    def close\(.*\n(?:^     .*\n)+", (ROOT / "README.md").read_text(encoding="utf-8"))
    scope: dict[str, Any] = {}
    exec(textwrap.dedent(shown), scope)
    prompt = Prompt(0, "", (), {"answer": "42"})
    assert [scope["close"](prompt, answer) for answer in ("42", "41", "no number")] == [1.0, 0.5, 0.0]
