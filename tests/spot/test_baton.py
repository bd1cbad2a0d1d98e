"""The baton: the worker that trains, and the state from which it continues."""

from __future__ import annotations

from tlt.spot.baton import Baton


def test_one_worker_trains_and_the_next_continues_from_its_state() -> None:
    baton = Baton[str]()
    assert baton.pass_to(0) is None, "all begin alike"
    baton.trained(0)
    assert not baton.is_free(1)
    assert baton.is_free(0)
    assert baton.pass_to(0) is None, "its state is the newest"
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


def test_training_of_a_lost_worker_is_lost() -> None:
    baton = Baton[str]()
    baton.trained(0)
    baton.taken(0, "first")
    assert baton.pass_to(1) == "first"
    baton.trained(1)
    baton.lost(1)
    assert [baton.pass_to(worker) for worker in (0, 1, 2)] == [None, "first", "first"], "a new worker 1 lacks it too"
