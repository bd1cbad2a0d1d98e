"""Padding of a pass is not computed, with the same result. test_losslessness.py compares tokens with a reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import PROMPTS, Target, build, learned, make_requests

from tlt.draft.strategy import PLAIN
from tlt.draft.tree import DraftTree, stack
from tlt.engine.engine import Engine
from tlt.engine.runner import Sampled
from tlt.types import SamplingParams

TREES = [
    DraftTree.chain(1, [2, 3, 0]),
    DraftTree.chain(2, []),
    DraftTree([3, 1, 4, 2], [0, 0, 0, 1], [0, 1, 1, 2], [1.0] * 4, [-1] * 4),
    DraftTree.chain(4, [1]),
]


def started(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[int]]:
    """Return an engine with four rows, and the numbers of tokens of its further passes."""
    target = Target()
    engine, computed = build(target, learned(target), PLAIN, 4), list[int]()
    engine.start(make_requests(PROMPTS, (SamplingParams(0.7, top_k=4, max_new_tokens=20),), group=2))
    engine.round()
    engine.make_room(PLAIN._replace(verify_tokens=8))
    whole = target.decoder.forward

    def counted(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(tokens.numel())
        return whole(tokens, *rest)

    monkeypatch.setattr(target.decoder, "forward", counted)
    return engine, computed


def verified(engine: Engine, padding: bool) -> Sampled:
    now = engine.open_round(PLAIN._replace(depth=3, verify_tokens=4))
    stacked = stack(TREES, engine.target.device)
    assert stacked.nodes is not None
    if padding:
        stacked = stacked._replace(nodes=None)
    return engine.rollout.runner.verify(stacked, now.lengths, engine.rollout.noise, now.positions, now.batch.sampling)


def test_padding_is_not_computed_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, computed = started(monkeypatch)
    packed, padded = verified(engine, False), verified(engine, True)
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


def test_trees_of_one_size_have_no_padding() -> None:
    device = torch.device("cpu")
    assert stack([DraftTree.chain(1, [2]), DraftTree.chain(0, [3])], device).nodes is None
    assert stack([DraftTree.chain(1, [2]), DraftTree.chain(0, [])], device).nodes is not None
    assert stack([DraftTree.chain(1, [])], device, nodes=3).nodes is not None


def test_a_layer_keeps_its_window_where_padding_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = started(monkeypatch)
    store, windows, whole = engine.cache.store, list[int | None](), engine.target.forward
    attends = store.attend

    def seen(plan: Any, layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        *tensors, window = qkv
        windows.append(window)
        return attends(plan, layer, *tensors, None)

    def windowed(tokens: torch.Tensor, positions: torch.Tensor, attend: Any, taps: Any = None) -> torch.Tensor:
        narrow: Any = lambda layer, *qkv: attend(layer, *qkv, 100 + layer)  # noqa: E731
        return whole(tokens, positions, narrow, taps)

    monkeypatch.setattr(store, "attend", seen)
    monkeypatch.setattr(engine.target, "forward", windowed)
    verified(engine, padding=False)
    assert windows == [100, 101]
