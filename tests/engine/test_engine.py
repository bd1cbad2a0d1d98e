"""The engine for its callers: results, ends of responses, counters, and errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from small import Replay, by_seed, decode, decoder_of
from tiny import qwen3

from tlt.config import EngineConfig
from tlt.draft.drafter import Candidates
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.types import Prompt, Request, Response, SamplingParams

VOCAB = 300
DRAFTED = Strategy("", depth=6)


@cache
def target() -> Decoder:
    return decoder_of(qwen3(5, vocab_size=VOCAB, num_hidden_layers=3, head_dim=16, initializer_range=0.4))


def engine(drafter: Any = None, shape: Strategy = PLAIN, detokenize: Any = None, **config: int) -> Engine:
    """Return an engine that always drafts with this drafter, if there is one."""
    drafters, strategy = ([drafter], shape._replace(drafter=drafter.name)) if drafter else ([], PLAIN)
    return Engine(target(), EngineConfig(**config), drafters, Fixed(strategy), detokenize=detokenize)


def request(prompt: Sequence[int] = (7, 8, 9), index: int = 0, prompt_id: int = 0, **params: Any) -> Request:
    sampling: dict[str, Any] = {"max_new_tokens": 12} | params
    return Request(Prompt(prompt_id, "", tuple(prompt)), index, 0, 1000 * prompt_id + index, SamplingParams(**sampling))


def some_requests(count: int, **params: Any) -> list[Request]:
    """Return requests with prompts of 1 to 6 tokens and responses of 3 to 20, in groups of two."""
    return [
        request([5 + n // 2] * (1 + n // 2 % 6), n % 2, n // 2, **({"max_new_tokens": 3 + 7 * n % 18} | params))
        for n in range(count)
    ]


def tokens(responses: Sequence[Response]) -> list[Sequence[int]]:
    return [response.token_ids for response in responses]


@pytest.mark.parametrize("strategy", [PLAIN, DRAFTED], ids=["plain", "drafted"])
def test_a_response_ends_at_a_stop_token_or_at_max_new_tokens(strategy: Strategy) -> None:
    """The drafter continues after the end, and the target agrees with all its tokens. The stop token may be the last
    token that there is room for."""
    (whole,) = decode(engine(), [request(max_new_tokens=20)])
    for end, token in enumerate(whole.token_ids, start=1):
        ways = [(end, (VOCAB - 1,), "length")]
        if token not in whole.token_ids[: end - 1]:
            ways += [(most, (VOCAB - 1, token), "stop") for most in (20, end)]
        for most, stops, reason in ways:
            one = engine(Replay([whole]), strategy)
            (ended,) = decode(one, [request(max_new_tokens=most, stop_token_ids=stops)])
            assert (ended.token_ids, ended.finish_reason) == (whole.token_ids[:end], reason)
            assert len(ended.logprobs) == len(ended.full_logprobs) == one.stats.tokens == end


def test_a_rollout_without_drafts_has_no_seconds_of_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of the target's tokens, which every round prepares, is here made slow."""
    one = engine()
    prepare = one.open_round

    def slow(strategy: Strategy) -> Any:
        time.sleep(0.05)
        return prepare(strategy)

    monkeypatch.setattr(one, "open_round", slow)
    decode(one, [request(max_new_tokens=5)])
    assert one.stats.rounds == 5
    assert one.stats.seconds["draft"] < 0.05
    assert one.stats.seconds["verify"] >= 5 * 0.05


def test_the_text_begins_with_the_prefill_but_the_tokens_do_not() -> None:
    asked = request((3, 4, 5), max_new_tokens=4)
    with_prefill = replace(asked, prompt=replace(asked.prompt, prefill="<think>."))
    (plain,), (prefilled,) = (decode(engine(detokenize=str), [one]) for one in (asked, with_prefill))
    assert (prefilled.token_ids, prefilled.logprobs) == (plain.token_ids, plain.logprobs)
    assert prefilled.text == "<think>." + plain.text


def test_a_row_that_is_free_is_filled_at_once() -> None:
    batched = engine(max_rows=3)
    lengths = [len(each) for each in tokens(decode(batched, some_requests(14)))]
    assert batched.stats.row_passes <= 3 * batched.stats.rounds
    assert batched.stats.rounds <= sum(lengths) / 3 + max(lengths)


def test_each_request_gets_its_response_as_soon_as_it_ends() -> None:
    requests = [request(index=i, max_new_tokens=length) for i, length in enumerate((9, 2, 5))]
    order = [response.request.index for response in engine().generate(requests)]
    assert order == [1, 2, 0]


def test_a_group_is_prefilled_once() -> None:
    """The prefill leaves out the last token of the prompt, which is the root of the first round. A sibling that comes
    late copies the prompt of an active row."""
    lengths = (30, 4, 9, 4, 6)
    group = [request(tuple(range(20)), index=i, max_new_tokens=length) for i, length in enumerate(lengths)]
    other = [request(tuple(range(7)), index=i, prompt_id=1) for i in range(3)]
    one, narrow = engine(), engine(max_rows=2)
    want = tokens(decode(one, group))
    assert one.stats.prefill_tokens == 19
    for mixed in ([*group, *other], [group[0], other[0], group[1], other[1], group[2]]):
        decode(one, mixed)
        assert one.stats.prefill_tokens == 19 + 6
    assert tokens(decode(narrow, group)) == want
    assert narrow.stats.prefill_tokens == 19


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the number of tokens in each pass of the target. It is filled while the test runs."""
    forward, sizes = target().forward, list[int]()
    monkeypatch.setattr(target(), "forward", lambda ids, *more: sizes.append(ids.numel()) or forward(ids, *more))
    return sizes


@pytest.mark.parametrize("prefill_tokens", [1, 5, 40])
def test_prefill_passes_stay_within_their_bound(prefill_tokens: int, computed: list[int]) -> None:
    requests = [request(tuple(range(3 * i + 2)), prompt_id=i) for i in range(6)]
    want = tokens(decode(engine(), requests))
    computed.clear()
    assert tokens(decode(engine(prefill_tokens=prefill_tokens), requests)) == want
    assert max(computed) <= max(prefill_tokens, len(requests))  # a decode pass has one token a row


def test_an_engine_left_in_the_middle_of_a_rollout_starts_a_new_one() -> None:
    requests = some_requests(6)
    want = tokens(decode(engine(), requests))
    drafter = SuffixDrafter()
    one = engine(drafter, DRAFTED, max_rows=2)
    next(one.generate(requests))
    assert tokens(decode(one, requests)) == want
    assert drafter.rows == [], "the drafter is told that nobody decodes any more"


@pytest.mark.parametrize("call", [1, 2])
def test_a_rollout_does_not_continue_after_a_failed_round(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call 1 is the first prefill, and call 2 another part of it. The rows are active then, and their places are
    empty."""
    requests = [request(range(i, i + 3 + 2 * i), i, prompt_id=i) for i in range(3)]
    want = by_seed(engine().generate(requests))
    one, forward, calls = engine(max_rows=4, prefill_tokens=4), target().forward, count(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise RuntimeError("out of memory, say")
        return forward(*args, **kwargs)

    monkeypatch.setattr(target(), "forward", fails)
    one.start(requests)
    with pytest.raises(RuntimeError, match="memory"):
        one.round()
    with pytest.raises(AssertionError, match="call start"):
        one.round()
    assert by_seed(one.generate(requests)) == want


@pytest.mark.parametrize("strategy", [PLAIN, DRAFTED], ids=["plain", "drafted"])
def test_counters_add_up_and_padding_is_not_computed(strategy: Strategy, computed: list[int]) -> None:
    used = engine(SuffixDrafter() if strategy == DRAFTED else None, strategy)
    responses = decode(used, [request(index=i, top_k=2, max_new_tokens=10 + 6 * i) for i in range(6)])
    stats = used.stats
    assert stats.tokens == sum(len(r.token_ids) for r in responses)
    assert stats.tokens == stats.accepted + stats.row_passes, "each pass of a row gives one bonus token"
    assert stats.accepted <= stats.drafted <= stats.row_passes * strategy.depth
    assert sum(computed) == stats.prefill_tokens + stats.drafted + stats.row_passes, "without the padding of drafts"
    assert stats.accept_length == stats.tokens / stats.row_passes
    assert (stats.accepted > 0) == (strategy == DRAFTED)
    assert strategy == DRAFTED or stats.rounds == max(len(r.token_ids) for r in responses)
    assert set(stats.seconds) == {"prefill", "draft", "verify", "commit", "ahead"}
    assert all(seconds >= 0 for seconds in stats.seconds.values())


class Failing(SuffixDrafter):
    """Drafter that raises at the nth call of one of its methods, or returns invalid candidates."""

    def __init__(self, method: str, call: int, result: Any = None) -> None:
        super().__init__()
        sound, calls = getattr(self, method), count(1)

        def fails(*args: Any) -> Any:
            if next(calls) < call:
                return sound(*args)
            if result is None:
                raise RuntimeError("the drafter broke")
            return result

        setattr(self, method, fails)


@pytest.mark.parametrize(
    ("method", "call"), [("begin", 1), *((m, c) for m in ("open", "commit", "close", "propose") for c in (1, 5))]
)
def test_a_drafter_that_raises_is_dropped_counted_and_changes_nothing(method: str, call: int) -> None:
    requests = some_requests(8)
    want = tokens(decode(engine(), requests))
    broken = engine(Failing(method, call), DRAFTED, max_rows=4)
    assert tokens(decode(broken, requests)) == want
    assert broken.stats.drafter_failures == 1
    assert not broken.drafters.usable
    assert tokens(decode(broken, requests)) == want
    assert broken.stats.drafter_failures == 0
    assert broken.stats.accept_length == 1.0


INVALID = {
    "log_q of one row": Candidates(None, torch.zeros(1, VOCAB)),
    "no such class": Candidates(None, torch.zeros(8, VOCAB), classes=np.full(8, 10**6)),
}


@pytest.mark.parametrize("result", INVALID.values(), ids=INVALID)
def test_invalid_output_of_a_batched_drafter_changes_no_token(result: Candidates) -> None:
    """test_chains.py has the other wrong shapes."""
    requests = some_requests(8)
    want = tokens(decode(engine(), requests))
    broken = engine(Failing("predict", 2, result), DRAFTED)
    assert tokens(decode(broken, requests)) == want
    assert broken.stats.drafter_failures == 1
