"""Checks that each promise of docs/trust.md has a test, and that the README's example works."""

from __future__ import annotations

import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from tlt.types import Prompt

ROOT = Path(__file__).parent.parent


def test_every_promise_of_the_page_has_a_test() -> None:
    lines = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8").splitlines()
    risks = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    promises = tomllib.loads((ROOT / "tests" / "promises.toml").read_text(encoding="utf-8"))
    assert [risk for risk in risks if risk != "risk"] == list(promises)
    assert len(promises) > 100
    for tests in promises.values():
        for named in [tests] if isinstance(tests, str) else tests:
            file, _, test = named.partition("::")
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), named


def test_the_readme_shows_a_reward_that_reads_a_column() -> None:
    (shown,) = re.findall(r"(?m)^    def close\(.*\n(?:^     .*\n)+", (ROOT / "README.md").read_text(encoding="utf-8"))
    scope: dict[str, Any] = {}
    exec(textwrap.dedent(shown), scope)
    prompt = Prompt(0, "", (), {"answer": "42"})
    assert [scope["close"](prompt, answer) for answer in ("42", "41", "no number")] == [1.0, 0.5, 0.0]
