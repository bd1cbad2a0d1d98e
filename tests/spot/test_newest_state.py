"""The newest: the worker that trains, and the state from which it continues."""

from __future__ import annotations

from tlt.spot.schedule import NewestState


def test_one_worker_trains_and_the_next_continues_from_its_state() -> None:
    newest = NewestState[str]()
    assert newest.pass_to(0) is None, "all begin alike"
    newest.trained(0)
    assert not newest.is_free(1)
    assert newest.is_free(0)
    assert newest.pass_to(0) is None, "its state is the newest"
    newest.taken(0, "first")
    assert newest.pass_to(1) == "first"
    assert newest.pass_to(0) is None, "it has it"
    newest.trained(1)
    newest.taken(1, "second")
    assert [newest.pass_to(worker) for worker in (0, 1, 2)] == ["second", None, "second"]


def test_training_that_is_not_finite_is_dropped() -> None:
    newest = NewestState[str]()
    newest.restart("saved")
    assert [newest.pass_to(worker) for worker in (0, 1, 0)] == ["saved", "saved", None], "none of them has trained"
    newest.trained(0)
    newest.taken(0, None)
    assert newest.pass_to(0) == "saved"


def test_training_of_a_lost_worker_is_lost() -> None:
    newest = NewestState[str]()
    newest.trained(0)
    newest.taken(0, "first")
    assert newest.pass_to(1) == "first"
    newest.trained(1)
    newest.lost(1)
    assert [newest.pass_to(worker) for worker in (0, 1, 2)] == [None, "first", "first"], "a new worker 1 lacks it too"
