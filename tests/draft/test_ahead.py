"""Store and chains of look-ahead drafts: the drafts that are kept, and a row's place in its old response."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.draft.ahead import Ahead, AheadStore, LookAhead
from tlt.types import Prompt, Request, Row, SamplingParams


def request(seed: int, prompt: int = 0) -> Request:
    return Request(Prompt(prompt, "", (prompt,)), 0, 0, seed, SamplingParams(max_new_tokens=1024))


def ahead(seed: int, tokens: list[int], prompt: int = 0) -> Ahead:
    return Ahead(seed, (prompt,), np.array(tokens, dtype=np.int32), 0, True)


def looking(*known: Ahead, row: Row | None = None) -> LookAhead:
    store = AheadStore(10**6)
    store.put(known)
    look = LookAhead(store, vocab_size=1000)
    look.append(row or Row(request(known[0].seed)), 0)
    return look


def chain(look: LookAhead, most: int = 64) -> list[int]:
    """Return the tokens that are proposed now."""
    return look.propose([min(most, look.offers()[0])])[0]


def commit_each(look: LookAhead, tokens: Iterable[int]) -> None:
    for token in tokens:
        look.commit([[token]])


def held(line: list[tuple[int, int, int]]) -> int:
    """Return the number of tokens of these (seed, prompt, length), and of their prompts of one token."""
    return sum(item[2] for item in line) + len({item[1] for item in line})


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 9)), max_size=30), st.integers(0, 40))
def test_the_newest_drafts_are_kept_up_to_the_bound(puts: list[tuple[int, int, int]], most: int) -> None:
    """Compare the store with a plain list of the drafts."""
    store, line = AheadStore(most), list[tuple[int, int, int]]()
    for seed, prompt, length in puts:
        seed = 10 * prompt + seed  # a seed is of one prompt
        store.put([ahead(seed, [1] * length, prompt)])
        if not length or any(item[0] == seed and item[2] > length for item in line):
            continue  # of one target, the longer
        line = [item for item in line if item[0] != seed] + [(seed, prompt, length)]
        while held(line) > most:
            line.pop(0)
        assert len(store) == len(line)
        assert store.tokens == held(line)
        for prompt_id in range(3):
            seeds = {item[0] for item in line if item[1] == prompt_id}
            assert {a.seed for a in store.group(request(-1, prompt_id))} == seeds
            for own in seeds:
                assert store.group(request(own, prompt_id))[0].seed == own


def test_an_accepted_chain_doubles_the_length_and_a_rejection_halves_it() -> None:
    old = list(range(1, 500))
    look = looking(ahead(7, old))
    assert chain(look) == old[:64], "as long as a draft may be"
    look.commit([[*old[:10], 999]])
    assert chain(look) == [], "it has parted"
    look.commit([[old[11]]])
    assert chain(look) == old[12:16], "one token was another: it is found again, and has to earn its width"
    look.commit([old[12:17]])  # all of it, and the bonus token
    assert chain(look) == old[17 : 17 + 8]
    look.commit([old[17:26]])
    assert chain(look) == old[26 : 26 + 16]
    look.commit([[*old[26:30], 999]])
    look.commit([[999]])
    assert chain(look) == [], "nothing is as it was there"
    look.commit([[999]])
    look.commit([[old[33]]])
    assert chain(look) == old[34:38]


def test_the_place_is_found_again_after_deleted_or_inserted_tokens() -> None:
    old = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
    for new in ([10, 14, 15, 16, 17], [10, 500, 501, 502, 14, 15, 16, 17], [10, 11, 12, 11, 14, 15, 16, 17]):
        look = looking(ahead(7, old))
        commit_each(look, new)
        assert chain(look) == [18, 19, 20, 21]


def test_a_rows_own_old_response_is_preferred_to_that_of_a_sibling() -> None:
    again = [1, 2, 3, 4]
    look = looking(ahead(7, [9, 9, *again, 50, *range(100, 300)]), ahead(8, [*range(400, 600), *again, 60, 61]))
    commit_each(look, [*range(700, 900), *again])
    assert chain(look) == [50, 100, 101, 102], "however far away"
    commit_each(look, (777, 100, 401, 402, 403, 404))
    assert chain(look) == [405, 406, 407, 408]


@pytest.mark.parametrize(("prompt", "drafted"), [(0, [34, 35]), (1, [])], ids=["a sibling", "of another prompt"])
def test_a_sibling_drafts_where_the_own_response_does_not(prompt: int, drafted: list[int]) -> None:
    look = looking(ahead(7, [1, 2, 3, 4, 5, 6]), ahead(8, [9, 9, 9, 30, 31, 32, 33, 34, 35], prompt))
    commit_each(look, (1, 2, 30, 31, 32, 33))
    assert chain(look) == drafted


def test_a_row_without_an_own_response_is_not_drafted_by_a_sibling() -> None:
    assert looking(ahead(8, [1, 2, 3, 4, 5, 6]), row=Row(request(7))).offers() == [0]


@pytest.mark.parametrize(
    ("seed", "tokens", "ended", "continued"),
    [
        (7, [1, 2, 3], False, [1, 2, 3]),
        (8, [1, 2, 3], False, []),
        (7, [1, 2, 3], True, []),
        (7, [1, 2, 1000], False, []),
        (7, [1, -1], False, []),
        (7, [1] * 512, False, [1] * 512),
        (7, [1] * 513, False, []),
    ],
    ids=["unfinished", "a sibling's", "ended", "above the vocabulary", "negative", "longest", "too long to prefill"],
)
def test_a_look_ahead_row_continues_an_unfinished_draft(
    seed: int, tokens: list[int], ended: bool, continued: list[int]
) -> None:
    store = AheadStore(10**6)
    store.put([ahead(seed, tokens)._replace(ended=ended)])
    row = store.row(request(7), vocab_size=1000, most=512)
    assert (row.request, row.tokens, row.ahead) == (request(7), continued, True)
    row.tokens.append(9)
    assert store.row(request(7), vocab_size=1000, most=512).tokens == continued, "a copy"


def test_a_row_that_could_not_go_on_does_not_continue_a_draft() -> None:
    store, short = AheadStore(100), replace(request(7), sampling=SamplingParams(max_new_tokens=3))
    for length, continued in ((2, 2), (3, 0)):
        store.put([ahead(7, [1] * length)._replace(ended=False)])
        assert len(store.row(short, vocab_size=1000, most=512).tokens) == continued


@pytest.mark.parametrize(
    ("known", "tokens", "kept"),
    [((), [5, 6], [5, 6]), ((1, 2, 3, 4), [5, 6], [5, 6, 3, 4]), ((1, 2), [5, 6, 7], [5, 6, 7])],
)
def test_the_rest_of_a_draft_is_kept_behind_the_tokens_of_a_newer_target(
    known: tuple[int, ...], tokens: list[int], kept: list[int]
) -> None:
    store = AheadStore(100)
    store.put([ahead(7, list(known))])
    store.put_row(Row(request(7), tokens), version=1)
    found = store.get(request(7))
    assert found
    assert (found.tokens.tolist(), found.version, found.ended) == (kept, 1, False)


def test_nothing_is_proposed_at_the_end_of_the_old_response() -> None:
    look = looking(ahead(7, [1, 2, 3]))
    look.commit([[1, 2]])
    assert chain(look) == [3]
    look.commit([[3, 4]])
    commit_each(look, (1, 2, 3, 1, 2, 3))
    assert chain(look) == []


def test_rows_that_leave_are_tracked() -> None:
    store = AheadStore(100)
    store.put(ahead(seed, [seed, seed + 1], prompt=seed) for seed in (1, 2, 3))
    look = LookAhead(store, vocab_size=10)
    for seed in (1, 2, 3):
        look.append(Row(request(seed, prompt=seed)), 0)
    look.remove(0, 2)
    look.commit([[3], []])
    assert look.propose([1, 1]) == [[4], [2]]
    look.remove(1, 1)
    assert look.offers() == [1]


@pytest.mark.parametrize("tokens", [[1, 2, 1000], [-1, 2]])
def test_invalid_tokens_are_not_proposed(tokens: list[int]) -> None:
    for known in ([ahead(7, tokens)], [ahead(7, [1, 2, 3, 4, 5]), ahead(8, tokens)]):
        assert looking(*known).offers() == [0]


def test_a_draft_of_a_newer_target_replaces_a_longer_one() -> None:
    store = AheadStore(100)
    store.put([ahead(7, [1, 2, 3]), ahead(7, [1, 4])._replace(version=1, ended=False)])
    kept = store.get(request(7))
    assert kept
    assert kept.tokens.tolist() == [1, 4]
