"""What is decoded for coming steps in vLLM, and what drafts from it. vLLM is not needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_vllm_engine import opened, requests, weights_of
from tiny import tiny_config

from tlt.build import open_workplace
from tlt.draft.ahead import Ahead, AheadStore
from tlt.types import Prompt, Request, Row, SamplingParams
from tlt.vllm.engine import VllmEngine
from tlt.vllm.look_ahead import LookAheadProposer, chains_for
from tlt.vllm.noise import Draw

VOCAB = 9
PROMPT = (1, 2, 3)


pytestmark = pytest.mark.usefixtures("started")


def request(seed: int) -> Request:
    return Request(Prompt(0, "", PROMPT), seed, 0, seed, SamplingParams(max_new_tokens=20))


def said(seed: int, *tokens: int) -> Ahead:
    return Ahead(seed, PROMPT, np.array(tokens, dtype=np.int32), 0, True)


class TestWhatTravelsWithARequest:
    def chains(self, *known: Ahead) -> list[list[int]]:
        store = AheadStore(100)
        store.put(known)
        return [np.frombuffer(c, dtype=np.int32).tolist() for c in chains_for(store, Row(request(1)), VOCAB)]

    def test_is_its_own_response_and_then_its_siblings(self) -> None:
        assert self.chains(said(2, 4, 5), said(1, 6, 7)) == [[6, 7], [4, 5]]

    def test_is_nothing_where_only_a_sibling_is_known(self) -> None:
        assert self.chains(said(2, 4, 5)) == []

    @pytest.mark.parametrize("foreign", [VOCAB, -1])
    def test_is_nothing_where_a_token_is_of_another_vocabulary(self, foreign: int) -> None:
        """vLLM would look it up in its embedding."""
        assert self.chains(said(1, 4, foreign)) == []
        assert self.chains(said(1, 4, 5), said(2, foreign)) == []


class TestTheProposer:
    @pytest.fixture
    def proposer(self) -> LookAheadProposer:
        options = SimpleNamespace(num_speculative_tokens=4)
        found = LookAheadProposer(
            SimpleNamespace(speculative_config=options, model_config=SimpleNamespace(max_model_len=64))
        )
        found.runner = SimpleNamespace(requests={}, input_batch=SimpleNamespace(req_ids=[]))
        return found

    def add(self, proposer: LookAheadProposer, name: str) -> None:
        extra = Draw(0, 1, 3, 1.0, 0, 1.0).as_extra([np.arange(8, dtype=np.int32).tobytes()])
        params = SimpleNamespace(max_tokens=20, extra_args=extra)
        proposer.runner.requests[name] = SimpleNamespace(prompt_token_ids=list(PROMPT), sampling_params=params)
        proposer.runner.input_batch.req_ids = list(proposer.runner.requests)

    def test_leaves_a_row_alone_whose_prompt_is_not_through(self, proposer: LookAheadProposer) -> None:
        """vLLM goes on with the prompt."""
        self.add(proposer, "a")
        tokens = np.array([[*PROMPT, 0, 1]], dtype=np.int32)
        assert proposer.propose([[]], np.array([3]), tokens) == [[]]
        assert proposer.propose([[0]], np.array([4]), tokens) == [[1, 2, 3, 4]]

    def test_forgets_rows_that_left(self, proposer: LookAheadProposer) -> None:
        for number in range(20):
            self.add(proposer, str(number))
            proposer.propose([[0]], np.array([4]), np.array([[*PROMPT, 0]], dtype=np.int32))
            proposer.runner.requests.clear()
        assert len(proposer._rows) <= 3


def test_what_is_known_of_the_rest_is_kept_as_a_row_is_broken_off(tmp_path: Path) -> None:
    """A newer target has said a part of it anew."""
    engine, asked = ahead_of(tmp_path)
    while engine.looks_ahead:
        engine.round()
    before = {request.seed: engine.store.length(request.seed) for request in asked}
    engine.target.load(weights_of(tiny_config(tmp_path)), 1)
    engine.start(())
    engine.look_ahead(asked)
    engine.round()
    partial = [row for row in engine.rows if len(row.tokens) < before[row.request.seed]]
    assert partial
    engine.keep_ahead()
    for row in partial:
        known = engine.store.get(row.request)
        assert known
        assert known.version == 1
        assert len(known.tokens) == before[row.request.seed]


def test_requests_of_coming_steps_are_not_given_up(tmp_path: Path) -> None:
    """Whoever takes a request over decodes it for this step; what is decoded ahead of it is no part of a response."""
    engine, asked = ahead_of(tmp_path)
    engine.round()
    assert engine.release_requests([request.seed for request in asked]) == []
    assert [row.request for row in engine.rows] == asked


def test_a_request_that_can_never_run_is_not_looked_ahead_for(tmp_path: Path) -> None:
    engine, asked = ahead_of(tmp_path)
    engine.round()
    long = replace(asked[0], sampling=replace(asked[0].sampling, max_new_tokens=10_000))
    with pytest.raises(ValueError, match="may reach 10011 tokens, but vLLM was started for"):
        engine.look_ahead([long])
    assert [row.request for row in engine.rows] == asked, "those before go on"


def ahead_of(home: Path) -> tuple[VllmEngine, list[Request]]:
    config = tiny_config(home, speculation={"drafter": "adaptive"})
    engine, asked = opened(config), requests(open_workplace(config), 3)
    engine.start(())
    engine.look_ahead(asked)
    return engine, asked
