"""The start-up profile in a world whose passes and drafts take a known time."""

from __future__ import annotations

import math
from functools import partial
from itertools import count
from typing import Any

import pytest
from small import Target, decoder_of, learned
from tiny import qwen3

from tlt.config import EngineConfig
from tlt.draft.eagle import EagleLayer, eagle_options
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine import profile as module
from tlt.engine.engine import Engine
from tlt.engine.profile import profile

ARMS = [
    PLAIN,
    PLAIN._replace(ahead=63),
    *(Strategy("suffix", d) for d in (1, 4)),
    Strategy("eagle", 6),
]
LEVEL = {"suffix": (1e-4, 1e-5), "eagle": (9e-4, 4e-4)}
"""seconds of the first level of a draft, and of each further one"""


def seconds_of(arm: Strategy, rows: int) -> float:
    """A pass takes 1 ms, and 0.05 ms more for each token; the levels of a draft take as long for any rows."""
    verified = 1e-3 + 5e-5 * rows * arm.new
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
        def verify(self, now: Any, drafts: Any) -> Any:
            takes(seconds_of(PLAIN._replace(depth=len(drafts[0].tokens)), len(drafts)))
            return super().verify(now, drafts)

        def draft(self, now: Any) -> Any:
            if now.strategy.drafter != PLAIN.drafter:
                first, further = LEVEL[now.strategy.drafter]
                takes(first + (now.strategy.depth - 1) * further)
            return super().draft(now)

    monkeypatch.setattr(module, "Engine", Timed)
    monkeypatch.setattr(module, "time", type("Clock", (), {"perf_counter": lambda: now[0]}))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("max_rows", [1, 16, 256])
def test_it_holds_for_rows_and_depths_that_were_not_timed(max_rows: int) -> None:
    target = Target()
    drafter = learned(target)
    drafters = [SuffixDrafter(target.decoder.options.vocab_size), drafter]
    found = profile(target.decoder, EngineConfig(max_rows=max_rows), drafters, ARMS, drafter.options.layout)
    assert set(found) == {rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256) if rows <= max_rows}
    for rows, by_arm in found.items():
        assert by_arm == {arm: pytest.approx(seconds_of(arm, rows)) for arm in ARMS}


@pytest.mark.parametrize(
    ("bound", "changes", "settings"),
    [
        *((bound, {}, {}) for bound in (1, 300, 320, 640, 5000)),
        (1, {"max_position_embeddings": 20}, {"prefill_tokens": 1}),
        (5000, {"max_position_embeddings": 3}, {}),
        (5000, {"max_position_embeddings": 9}, {"max_rows": 1}),
        (5000, {"max_position_embeddings": 161, "vocab_size": 5}, {"prefill_tokens": 1, "max_rows": 1}),
        (5000, {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, {}),
    ],
)
def test_the_profile_fits_into_a_small_cache_and_a_short_model(
    bound: int, changes: dict[str, Any], settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows grow from round to round. A pass beyond the cache would be an IndexError of the ledger, and a position
    beyond the model's limit an IndexError of the rotary table."""
    monkeypatch.setattr(module, "Engine", partial(Engine, kv_tokens=bound))
    target = decoder_of(qwen3(**{"vocab_size": 99} | changes))
    layer = EagleLayer(eagle_options(target.options, "eagle1", 8))
    drafters = [SuffixDrafter(target.options.vocab_size), EagleDrafter(layer, target)]
    arms = [PLAIN, Strategy("suffix", 3), Strategy("eagle", 8)]
    costs = profile(target, EngineConfig(**{"max_rows": 16} | settings), drafters, arms, layer.options.layout)
    assert all(0 < seconds < math.inf for by_arm in costs.values() for seconds in by_arm.values())
