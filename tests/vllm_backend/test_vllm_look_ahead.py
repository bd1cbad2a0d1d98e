"""Look-ahead with vLLM, and drafts from its tokens. vLLM is not needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_vllm_engine import engines, weights_of

from tlt.types import Request
from tlt.vllm.vllm_engine import VllmEngine

pytestmark = pytest.mark.usefixtures("started")


def test_an_unfinished_draft_of_an_older_target_is_continued(tmp_path: Path) -> None:
    engine, asked = ahead_of(tmp_path)
    engine.round()
    engine.target.load(weights_of(tmp_path), 1)
    engine.start(())
    before = {request.seed: engine.store.get(request) for request in asked}
    assert all(known and not known.ended for known in before.values())
    engine.look_ahead(asked)
    engine.round()
    assert len(engine.rows) == len(asked)
    for row in engine.rows:
        known = before[row.request.seed]
        assert known
        assert row.tokens[: len(known.tokens)] == known.tokens.tolist()
        assert len(row.tokens) > len(known.tokens)


def test_look_ahead_requests_are_not_transferred(tmp_path: Path) -> None:
    """A worker that takes over a request decodes it for this step. Look-ahead tokens of it are not part of a
    response."""
    engine, asked = ahead_of(tmp_path)
    engine.round()
    assert engine.release_requests([request.seed for request in asked]) == []
    assert [row.request for row in engine.rows] == asked


def test_a_request_that_is_too_large_gets_no_look_ahead(tmp_path: Path) -> None:
    engine, asked = ahead_of(tmp_path)
    engine.round()
    long = replace(asked[0], sampling=replace(asked[0].sampling, max_new_tokens=10_000))
    with pytest.raises(ValueError, match=r"may reach 10011 tokens, but vLLM was started for .*: lower rollout"):
        engine.look_ahead([long])
    assert [row.request for row in engine.rows] == asked, "those before go on"


def ahead_of(home: Path) -> tuple[VllmEngine, list[Request]]:
    engine, _, asked = engines(home, 3, "adaptive")
    engine.start(())
    engine.look_ahead(asked)
    return engine, asked


def test_preempted_look_ahead_rows_keep_their_tokens_and_continue(tmp_path: Path) -> None:
    engine, _, asked = engines(tmp_path, 6, "adaptive")
    engine.start(())
    engine.look_ahead(asked[:3])
    for _ in range(2):
        engine.round()
    had = {row.request.seed: list(row.tokens) for row in engine.rows}
    assert had.keys() == {request.seed for request in asked[:3]}
    engine.submit(asked[3:])
    engine.round()
    assert {request.seed: stored(engine, request) for request in asked[:3]} == had
    while engine.busy:
        engine.round()
    engine.round()
    assert {row.request.seed: row.tokens[:2] for row in engine.rows} == had
    assert engine.stats.ahead_tokens == sum(len(row.tokens) for row in engine.rows), "nothing is decoded again"


def stored(engine: VllmEngine, request: Request) -> list[int]:
    known = engine.store.get(request)
    return known.tokens.tolist() if known else []


def test_repeated_look_ahead_requests_continue_and_others_leave_with_their_tokens(tmp_path: Path) -> None:
    engine, asked = ahead_of(tmp_path)
    engine.round()
    engine.look_ahead(asked[1:])
    assert [row.request for row in engine.rows] == asked[1:]
    assert len(stored(engine, asked[0])) == 1
    engine.round()
    assert [row.request for row in engine.rows] == asked[1:], "each is decoded once"
