"""The suffix drafter: its matches and its proposals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tlt.draft.ahead import Ahead, AheadStore
from tlt.draft.drafter import Prefix
from tlt.draft.suffix import SuffixDrafter
from tlt.types import Prompt, Request, SamplingParams


def request(prompt: Sequence[int] = (90, 91, 92), prompt_id: int = 0, epoch: int = 0, index: int = 0) -> Request:
    return Request(Prompt(prompt_id, "", tuple(prompt)), index, epoch, 0, SamplingParams())


def place_of(drafter: SuffixDrafter, request: Request) -> int:
    return next(i for i, (live, _) in enumerate(drafter.rows) if live == request)


def commit(drafter: SuffixDrafter, request: Request, tokens: Sequence[int]) -> None:
    drafter.commit(place_of(drafter, request), tokens)


def close(drafter: SuffixDrafter, request: Request) -> None:
    drafter.close(place_of(drafter, request), len(drafter.rows) - 1)


def decoded(drafter: SuffixDrafter, request: Request, tokens: Sequence[int]) -> None:
    """Add a response that was decoded to its end."""
    drafter.open(request, [])
    for token in tokens:
        commit(drafter, request, [token])
    close(drafter, request)


def offers(drafter: SuffixDrafter, request: Request) -> dict[int, float]:
    """Return token -> q of the first draft token, without the escape probability."""
    out = drafter.propose([Prefix(request, (), ())])
    pairs = zip(out.ids[0].tolist(), out.log_q[0].exp().tolist(), strict=True)
    return {token: q for token, q in pairs if token >= 0 and q > 0}


def chain(drafter: SuffixDrafter, request: Request, depth: int) -> list[int]:
    """Return the likeliest candidate of each level."""
    path, state = list[int](), None
    for _ in range(depth):
        out = drafter.propose([Prefix(request, [], tuple(path), state)])
        listed = [k for k, token in enumerate(out.ids[0].tolist()) if token >= 0]
        if not listed:
            break
        best = max(listed, key=lambda k: float(out.log_q[0, k]))
        state = out.states[0][best]
        path.append(int(out.ids[0, best]))
    return path


def earlier(tokens: Sequence[int], prompt: Sequence[int] = (90, 91, 92)) -> Ahead:
    """Return a response of an earlier epoch."""
    return Ahead(1, tuple(prompt), np.array(tokens, dtype=np.int32), 0, ended=True)


class Match(NamedTuple):
    """Earlier responses of other requests, then the tokens of a new request, and what is proposed after them."""

    own: list[int]
    earlier: Sequence[tuple[Request, list[int]]] = ()
    follows: list[int] | None = None
    """as a chain of the likeliest tokens"""
    offered: dict[int, float] | None = None
    """at the first level, with their probabilities"""
    live: Request = request()
    sent: Sequence[Ahead] = ()
    """responses of an earlier epoch, which the driver sent"""


MATCHES = {
    "within the response": Match([1, 2, 3, 4, 5, 9, 1, 2], follows=[3, 4, 5]),
    "within the prompt": Match([1, 2], live=request(prompt=(1, 2, 3, 4, 9)), follows=[3, 4]),
    "in an earlier epoch": Match([1, 2], follows=[3, 4], sent=[earlier([1, 2, 3, 4])]),
    "across the end of the prompt": Match([1], follows=[3, 4], sent=[earlier([1, 3, 4])]),
    "not in another prompt": Match(
        [1, 2], [(request((9, 9)), [1, 2, 3, 4])], offered={}, sent=[earlier([1, 2, 3, 4], (9, 9))]
    ),
    "a long one beats a short one": Match(
        [1, 2, 3, 4], [(request(index=1), [1, 2, 3, 4, 50, 8, 8, 3, 4, 60, 8, 3, 4, 60])], offered={50: 1 / 1.6}
    ),
    "the newest 16 of an epoch, one of which is the last": Match(
        [7, 1, 2], [(request(index=1), [1, 2, 30] * 20 + [1, 2, 40] * 16)], offered={40: 15 / 16.5}
    ),
    "at most 16 over all epochs": Match(
        [7, 1, 2],
        [(request(index=1), [1, 2, 40] * 10)],
        offered={40: 10 / 16.5, 30: 5 / 16.5},
        sent=[earlier([1, 2, 30] * 40)],
    ),
    # after the pair (1, 2): 3 twice, 4 once, and 1.5 for all tokens that did not follow
    "by counts and escape": Match(
        [6, 1, 2], [(request(index=1), [1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 3])], offered={3: 2 / 4.5, 4: 1 / 4.5}
    ),
    "nothing after a prompt of one token": Match([], live=request(prompt=(5,)), offered={}),
    "nothing after one token": Match([1], live=request(prompt=(5,)), offered={}),
    "nothing without history": Match([1, 2], live=request(prompt=(5,)), offered={}),
}


@pytest.mark.parametrize("match", MATCHES.values(), ids=MATCHES)
def test_tokens_that_followed_the_last_ones_are_proposed(match: Match) -> None:
    store = AheadStore()
    store.put(match.sent)
    drafter = SuffixDrafter(store)
    for other, tokens in match.earlier:
        decoded(drafter, other, tokens)
    drafter.open(match.live, [])
    commit(drafter, match.live, match.own)
    if match.follows is not None:
        assert chain(drafter, match.live, len(match.follows)) == match.follows
    if match.offered is not None:
        assert offers(drafter, match.live) == pytest.approx(match.offered)


def test_a_match_in_a_sibling_that_is_still_growing() -> None:
    drafter, live, sibling = SuffixDrafter(), request(), request(index=1)
    drafter.open(sibling, [])
    drafter.open(live, [])
    commit(drafter, live, [1, 2])
    assert offers(drafter, live) == {}
    commit(drafter, sibling, [1, 2, 3])
    assert chain(drafter, live, 5) == [3]
    commit(drafter, sibling, [4])
    assert chain(drafter, live, 5) == [3, 4]


@given(
    texts=st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    own=st.lists(st.integers(0, 3), max_size=12),
)
@settings(max_examples=150)
def test_every_proposal_is_a_distribution_with_escape_over_tokens_that_followed(
    texts: list[list[int]], prompt: list[int], own: list[int]
) -> None:
    drafter = SuffixDrafter()
    for index, text in enumerate(texts):
        decoded(drafter, request(prompt, index=index), text)
    live = request(prompt, index=99)
    drafter.open(live, [])
    commit(drafter, live, own)
    seen = [tuple(prompt) + tuple(text) for text in (*texts, own)]
    prefixes = [Prefix(live, own, ())]
    for _ in range(4):
        out = drafter.propose(prefixes)
        assert len(out.states) == len(prefixes)
        longer = []
        for prefix, ids, log_q, states in zip(prefixes, out.ids.tolist(), out.log_q, out.states, strict=True):
            listed = int((log_q > -math.inf).sum())
            assert len(set(ids[:listed])) == listed == len(states)
            assert not listed or float(log_q.exp().sum()) == pytest.approx(1.0, abs=1e-5)
            for token, state in ((t, s) for t, s in zip(ids, states, strict=False) if t >= 0):
                tail = (*(*prompt, *own)[-2:], *prefix.drafted, token)
                assert any(tail == text[i : i + len(tail)] for text in seen for i in range(len(text)))
                longer.append(Prefix(live, own, (*prefix.drafted, token), state))
        if not longer:
            break
        prefixes = longer


def test_a_batch_of_rows_equals_each_row_alone() -> None:
    drafter, rows = SuffixDrafter(), [request(index=i) for i in range(3)]
    for row, tokens in zip(rows, ([1, 2, 3, 1, 2], [7], [4, 5, 4, 5, 4]), strict=True):
        drafter.open(row, [])
        commit(drafter, row, tokens)
    out = drafter.propose([Prefix(row, [], ()) for row in rows])
    for m, row in enumerate(rows):
        together = {t: q for t, q in zip(out.ids[m].tolist(), out.log_q[m].exp().tolist(), strict=True) if t >= 0}
        assert together == pytest.approx(offers(drafter, row))


def test_proposals_do_not_depend_on_when_earlier_tokens_were_matched() -> None:
    """1 2 was followed by 3 and by 4, each with 1 of 2 + 1.5 counts, whether there was a draft after each token or
    none."""
    live, drafters = request(), (SuffixDrafter(), SuffixDrafter())
    for drafter in drafters:
        drafter.open(live, [])
    for token in [1, 2, 3, 1, 2, 4, 1, 2]:
        for drafter in drafters:
            commit(drafter, live, [token])
        offers(drafters[0], live)
    for drafter in drafters:
        assert offers(drafter, live) == pytest.approx({3: 1 / 3.5, 4: 1 / 3.5})


def test_a_request_returns_after_a_preemption() -> None:
    drafter, live = SuffixDrafter(), request()
    drafter.open(live, [])
    commit(drafter, live, [1, 2, 3, 4])
    close(drafter, live)
    drafter.open(live, [1, 2, 3, 4])
    commit(drafter, live, [8, 1, 2])
    assert chain(drafter, live, 4) == [3, 4, 8, 1]


def test_a_repeated_request_starts_from_its_present_tokens() -> None:
    """A rollout was abandoned, or the same requests are decoded with another target version. Prompt, epoch and index
    are the same."""
    drafter, live = SuffixDrafter(), request(prompt=(5, 6))
    decoded(drafter, live, [1, 2, 3, 4])
    decoded(drafter, request(prompt=(5, 6), index=1), [7, 8])
    drafter.open(live, [])
    assert 7 in offers(drafter, live)


def test_nothing_of_an_earlier_rollout_is_left() -> None:
    store = AheadStore()
    store.put([earlier([1, 2, 3])])
    drafter, live = SuffixDrafter(store), request()
    decoded(drafter, request(index=1), [1, 2, 4])
    drafter.open(live, [])
    commit(drafter, live, [1, 2])
    assert offers(drafter, live).keys() == {3, 4}
    store.clear()
    drafter.begin(None)
    drafter.open(live, [])
    commit(drafter, live, [1, 2])
    assert offers(drafter, live) == {}
