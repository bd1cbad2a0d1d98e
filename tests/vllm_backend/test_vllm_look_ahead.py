"""Look-ahead with vLLM, and drafts from its tokens. vLLM is not needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_vllm_engine import engines, weights_of

from tlt.draft.ahead import Ahead, AheadStore
from tlt.types import Prompt, Request, Row, SamplingParams
from tlt.vllm.engine import VllmEngine, _chains

VOCAB = 9
PROMPT = (1, 2, 3)


pytestmark = pytest.mark.usefixtures("started")


def request(seed: int) -> Request:
    return Request(Prompt(0, "", PROMPT), seed, 0, seed, SamplingParams(max_new_tokens=20))


def saved(seed: int, *tokens: int) -> Ahead:
    return Ahead(seed, PROMPT, np.array(tokens, dtype=np.int32), 0, True)


class TestWhatTravelsWithARequest:
    def chains(self, *known: Ahead) -> list[list[int]]:
        store = AheadStore(100)
        store.put(known)
        return [np.frombuffer(c, dtype=np.int32).tolist() for c in _chains(store, Row(request(1)), VOCAB)]

    def test_a_draft_is_the_own_response_and_then_that_of_a_sibling(self) -> None:
        assert self.chains(saved(2, 4, 5), saved(1, 6, 7)) == [[6, 7], [4, 5]]

    @pytest.mark.parametrize("foreign", [VOCAB, -1])
    def test_there_is_no_draft_of_a_sibling_alone_or_of_another_vocabulary(self, foreign: int) -> None:
        """vLLM would look an unknown token up in its embedding."""
        assert self.chains(saved(2, 4, 5)) == []
        assert self.chains(saved(1, 4, foreign)) == []
        assert self.chains(saved(1, 4, 5), saved(2, foreign)) == []


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
