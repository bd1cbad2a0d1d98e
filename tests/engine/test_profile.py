"""The start-up profile in a world whose passes and drafts take a known time."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from small import Target, learned

from tlt.config import EngineConfig
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine import profile as module
from tlt.engine.engine import Engine
from tlt.engine.profile import profile

ARMS = [
    PLAIN,
    PLAIN._replace(ahead=63),
    *(Strategy("suffix", d, 1, d + 1) for d in (1, 4)),
    Strategy("eagle", 6, 2, 12),
]
LEVEL = {"suffix": (1e-4, 1e-5), "eagle": (9e-4, 4e-4)}
"""seconds of the first level of a draft, and of each further one"""


def seconds_of(arm: Strategy, rows: int) -> float:
    """A pass takes 1 ms, and 0.05 ms more for each token; the levels of a draft take as long for any rows."""
    verified = 1e-3 + 5e-5 * rows * arm.nodes
    if arm.drafter == PLAIN.drafter:
        return verified
    first, further = LEVEL[arm.drafter]
    return verified + first + (arm.depth - 1) * further


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fifth call is disturbed, and takes far longer."""
    now, calls = [0.0], count()

    def takes(seconds: float) -> None:
        now[0] += seconds + (0.05 if next(calls) % 5 == 0 else 0.0)

    class Timed(Engine):
        def verify(self, now: Any, trees: Any) -> Any:
            takes(seconds_of(PLAIN._replace(verify_tokens=len(trees[0].tokens)), len(trees)))
            return super().verify(now, trees)

        def draft(self, now: Any) -> Any:
            if now.strategy.drafter != PLAIN.drafter:
                first, further = LEVEL[now.strategy.drafter]
                takes(first + (now.strategy.depth - 1) * further)
            return super().draft(now)

    monkeypatch.setattr(module, "Engine", Timed)
    monkeypatch.setattr(module, "time", type("Clock", (), {"perf_counter": lambda: now[0]}))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("max_rows", [1, 16, 256])
def test_it_holds_for_rows_and_shapes_that_were_not_timed(max_rows: int) -> None:
    target = Target()
    drafter = learned(target)
    drafters = [SuffixDrafter(target.decoder.options.vocab_size), drafter]
    found = profile(target.decoder, EngineConfig(max_rows=max_rows), drafters, ARMS, drafter.options.layout)
    assert set(found) == {rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256) if rows <= max_rows}
    for rows, by_arm in found.items():
        assert by_arm == {arm: pytest.approx(seconds_of(arm, rows)) for arm in ARMS}
