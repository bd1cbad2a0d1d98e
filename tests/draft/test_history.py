"""The last responses to each prompt: which are kept, and their file in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
from hypothesis import given, settings

from tlt.draft.ahead import History
from tlt.types import Prompt, Request, Response, SamplingParams

LOTS = 10_000


def response(prompt: int, epoch: int, index: int, tokens: Sequence[int]) -> Response:
    seed = 2**64 - 1 - 10_000 * epoch - 100 * prompt - index
    request = Request(Prompt(prompt, "", (prompt, prompt + 1)), index, epoch, seed, SamplingParams())
    return Response(request, list(tokens), [], [], "stop")


def kept(history: History, prompt: int) -> list[tuple[int, list[int]]]:
    """Return seed and tokens of each response to a prompt, the oldest first."""
    return [(a.seed, a.tokens.tolist()) for a in history.group(response(prompt, 99, 0, []).request)]


def as_kept(responses: Sequence[Response]) -> list[tuple[int, list[int]]]:
    return [(response.request.seed, response.token_ids) for response in responses]


def test_the_responses_of_an_epoch_replace_those_of_the_one_before() -> None:
    history = History(LOTS)
    other = [response(5, 0, 0, [9])]
    history.add([*other, response(0, 0, 0, [1, 2]), response(0, 0, 1, [3])], version=0)
    newest = [response(0, 1, 0, [4]), response(0, 1, 1, [5, 6])]
    history.add(newest, version=1)
    assert kept(history, 0) == as_kept(newest)
    assert kept(history, 5) == as_kept(other)
    assert history.tokens == len([4, 5, 6, 9]) + 2 * 2


def test_a_prompt_that_is_decoded_in_two_epochs_at_once_keeps_both() -> None:
    history, both = History(LOTS), [response(0, 3, 0, [1]), response(0, 4, 0, [2])]
    history.add(both, version=0)
    assert kept(history, 0) == as_kept(both)


def test_the_oldest_are_dropped_at_the_bound() -> None:
    history = History(4 * (10 + 2))
    for prompt in range(10):
        history.add([response(prompt, 0, 0, [7] * 10)], version=0)
    assert [prompt for prompt in range(10) if kept(history, prompt)] == [6, 7, 8, 9]


def test_a_response_is_a_draft_of_its_own_request_alone() -> None:
    """Requests of an evaluation are repeated. Those of training are not: their seed is that of the epoch."""
    history, first = History(LOTS), response(0, 0, 0, [1, 2])
    history.add([first], version=3)
    found = history.get(first.request)
    assert found
    assert (found.tokens.tolist(), found.version, found.ended) == ([1, 2], 3, True)
    assert history.get(response(0, 1, 0, []).request) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 300), max_size=5)), max_size=8))
@settings(max_examples=30)
def test_a_file_restores_the_store(lists: list[tuple[int, list[int]]]) -> None:
    history, other = History(LOTS), History(LOTS)
    history.add([response(prompt, 0, index, tokens) for index, (prompt, tokens) in enumerate(lists)], version=5)
    with TemporaryDirectory() as folder:
        history.save(Path(folder))
        other.load(Path(folder))
    assert (len(other), other.tokens) == (len(history), history.tokens)
    assert [kept(other, prompt) for prompt in range(5)] == [kept(history, prompt) for prompt in range(5)]
    requests = [response(prompt, 0, index, []).request for index, (prompt, _) in enumerate(lists)]
    assert all((a.version, a.ended) == (5, True) for request in requests for a in other.group(request))
    for one in (history, other):
        one.most_tokens //= 2_000
        one.add([response(9, 0, 0, [1])], version=6)
    assert [kept(other, prompt) for prompt in range(10)] == [kept(history, prompt) for prompt in range(10)]


def test_a_smaller_bound_holds_for_a_file_too(tmp_path: Path) -> None:
    history, smaller = History(LOTS), History(5)
    history.add([response(prompt, 0, 0, [1, 2]) for prompt in range(3)], version=0)
    history.save(tmp_path)
    smaller.load(tmp_path)
    assert [prompt for prompt in range(3) if kept(smaller, prompt)] == [2]


def test_a_checkpoint_without_the_file_has_no_history(tmp_path: Path) -> None:
    history = History(LOTS)
    history.save(tmp_path)
    assert not list(tmp_path.iterdir())
    history.load(tmp_path)
    assert len(history) == 0
