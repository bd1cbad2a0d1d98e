"""Padding of a pass is not computed, with the same result. test_losslessness.py compares tokens with a reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import PROMPTS, Target, build, learned, make_requests

from tlt.draft.strategy import PLAIN
from tlt.draft.tree import DraftTree, stack
from tlt.types import SamplingParams

TREES = [
    DraftTree.chain(1, [2, 3, 0]),
    DraftTree.chain(2, []),
    DraftTree([3, 1, 4, 2], [0, 0, 0, 1], [0, 1, 1, 2], [1.0] * 4, [-1] * 4),
    DraftTree.chain(4, [1]),
]


def test_padding_is_not_computed_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, computed = Target(), list[int]()
    engine = build(target, learned(target), PLAIN, 4)
    engine.start(make_requests(PROMPTS, (SamplingParams(0.7, top_k=4, max_new_tokens=20),), group=2))
    engine.round()
    engine.make_room(PLAIN._replace(verify_tokens=8))
    whole = target.decoder.forward

    def counted(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(tokens.numel())
        return whole(tokens, *rest)

    monkeypatch.setattr(target.decoder, "forward", counted)
    now, stacked = engine.open_round(PLAIN._replace(depth=3, verify_tokens=4)), stack(TREES, engine.target.device)
    packed, padded = (
        engine.rollout.runner.verify(trees, now.lengths, engine.rollout.noise, now.positions, now.batch.sampling)
        for trees in (stacked, stacked._replace(nodes=None))
    )
    sizes = [len(tree.tokens) for tree in TREES]
    assert computed == [sum(sizes), len(sizes) * max(sizes)] == [11, 16]
    assert packed.finite is padded.finite is None
    assert packed.features is not None
    assert padded.features is not None
    for row, size in enumerate(sizes):
        assert packed.tokens[row][:size] == padded.tokens[row][:size]
        for found, expected in ((packed.logprobs, padded.logprobs), (packed.full_logprobs, padded.full_logprobs)):
            assert found[row][:size] == pytest.approx(expected[row][:size], abs=1e-12)
        torch.testing.assert_close(packed.features[row, :size], padded.features[row, :size], rtol=0, atol=1e-12)
