"""The baton: the worker that trains, and the state from which it continues."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tlt.spot.baton import Baton


def test_one_worker_trains_and_the_next_continues_from_its_state() -> None:
    baton = Baton[str]()
    assert baton.pass_to(0) is None, "all begin alike"
    baton.trained(0)
    assert not baton.is_free(1)
    assert baton.is_free(0)
    assert baton.pass_to(0) is None, "its state is the newest"
    assert baton.holder_is_busy([1, 2])
    assert not baton.holder_is_busy([0, 1])
    baton.taken(0, "first")
    assert baton.pass_to(1) == "first"
    assert baton.pass_to(0) is None, "it has it"
    baton.trained(1)
    baton.taken(1, "second")
    assert [baton.pass_to(worker) for worker in (0, 1, 2)] == ["second", None, "second"]


def test_training_that_is_not_finite_is_dropped() -> None:
    baton = Baton[str]()
    baton.restart("saved")
    assert [baton.pass_to(worker) for worker in (0, 1, 0)] == ["saved", "saved", None], "none of them has trained"
    baton.trained(0)
    baton.taken(0, None)
    assert baton.pass_to(0) == "saved"


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["train", "take", "lose"])), max_size=30))
def test_training_is_one_chain_in_any_case(events: list[tuple[int, str]]) -> None:
    """A state is the number of times that it was trained. Without a loss, no state is trained twice."""
    baton, states = Baton[int](), [0, 0, 0]
    newest = 0
    for worker, event in events:
        if event == "lose":
            newest = (baton.state or 0) if baton.holder == worker else newest
            states[worker] = 0
            baton.lost(worker)
            assert baton.holder != worker, "other workers may train"
        elif event == "train" and baton.is_free(worker):
            loaded = baton.pass_to(worker)
            states[worker] = (states[worker] if loaded is None else loaded) + 1
            baton.trained(worker)
            newest += 1
            assert states[worker] == newest
        elif event == "take" and baton.holder is not None:
            baton.taken(baton.holder, states[baton.holder])
