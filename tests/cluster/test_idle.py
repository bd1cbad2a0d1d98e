"""Assignment of look-ahead requests to workers, its value against hand-worked numbers, and the rest of idle work that
takes cores from workers that decode. No engine, no process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import TestPool
from tiny import tiny_config

from tlt.cluster.coordinator import Coordinator
from tlt.cluster.idle import ComingRequests, Crowding, IdleWork, in_order
from tlt.cluster.pool import Handle
from tlt.cluster.remote import ClusterPolicy
from tlt.cluster.supervisor import Done, Supervisor
from tlt.cluster.worker import AheadWork, DecodeWork, Slice
from tlt.draft.ahead import Ahead
from tlt.types import Prompt, Request, Response, RolloutStats, Row, SamplingParams, TrainBatch

SLICE = 0.2  # seconds


def request(seed: int) -> Request:
    return Request(Prompt(seed // 10, "", (seed // 10,)), seed % 10, 0, seed, SamplingParams())


def requests(*seeds: int) -> list[Request]:
    return [request(seed) for seed in seeds]


def known(seed: int, length: int = 1, ended: bool = True) -> Ahead:
    return Ahead(seed, (seed // 10,), np.ones(length, dtype=np.int32), 0, ended)


def looking(*found: Ahead, slots: int = 3, most_steps: int = 2) -> ComingRequests:
    ahead = ComingRequests(slots, most_steps)
    ahead.store.put(found)
    return ahead


def seeds(given: AheadWork | None) -> list[int]:
    return [request.seed for request in given.requests] if given else []


def test_no_request_is_decoded_twice_or_too_many_steps_ahead() -> None:
    ahead = looking()
    ahead.begin(iter([requests(10, 11), requests(20, 21, 22), requests(30, 31)]))
    assert seeds(ahead.work(0, 1, 2)) == [10, 11, 22]
    assert seeds(ahead.work(1, 1, 2)) == [20, 21]
    assert ahead.work(2, 1, 2) is None, "the step after the next two is too far"
    assert sorted(seeds(ahead.work(0, 1, 2))) == [10, 11, 22], "it goes on with what it has"


@pytest.mark.parametrize(
    ("given", "found", "order"),
    [
        ([10, 11, 20, 21, 22], (), [10, 20, 11, 21, 22]),
        ([11, 12, 20], (known(10, 5),), [20, 11, 12]),
        ([10, 11, 20, 21], (known(10, 6, ended=False), known(20, 8, ended=False)), [20, 10, 21, 11]),
        ([10, 20, 21, 30], (known(10, 8, ended=False), known(20, 8, ended=False)), [30, 10, 20, 21]),
    ],
    ids=[
        "one of each group first, the nearest first",
        "a group of which one is known needs no other",
        "what is longest so far, then its siblings",
        "of what is expected to be as long the nearest",
    ],
)
def test_requests_likely_to_be_longest_come_first(given: list[int], found: tuple[Ahead, ...], order: list[int]) -> None:
    assert [request.seed for request in in_order(requests(*given), looking(*found).store)] == order


def test_ended_responses_are_not_decoded_again_and_others_continue() -> None:
    ahead = looking(known(10, 5), known(11, 5, ended=False))
    ahead.begin(iter([requests(10, 11, 12)]))
    given = ahead.work(0, 7, 1)
    assert seeds(given) == [11, 12]
    assert given
    assert given.rollout == 7
    assert [(a.seed, len(a.tokens)) for a in given.drafts] == [(11, 5), (10, 5)], "its own, and those of its siblings"


def test_requests_of_an_ended_call_or_rollout_are_assigned_again() -> None:
    ahead = looking()
    ahead.begin(iter([requests(10, 11, 12)]))
    ahead.work(0, 1, 1)
    assert ahead.work(1, 1, 1) is None
    ahead.add_slice(0, [known(10, 4), known(11, 2, ended=False)])
    assert seeds(ahead.work(1, 1, 1)) == [11, 12]
    ahead.call_ended(1)
    assert seeds(ahead.work(0, 1, 1)) == [11, 12]
    ahead.begin(iter([requests(11, 12)]))
    assert seeds(ahead.work(1, 2, 1)) == [11, 12]


def test_free_slots_get_the_unfinished_coming_requests_once_in_each_rollout() -> None:
    ahead = looking(known(11))
    for coming, left in ((requests(10, 11), requests(10)), (requests(20, 21), requests(20, 21))):
        ahead.begin(iter([coming]))
        assert [ahead.for_free_slots(), ahead.for_free_slots()] == [left, None]


def test_only_a_worker_that_is_alone_gets_coming_requests_for_free_slots(tmp_path: Path) -> None:
    """Others decode them while they are idle."""
    idle = watched_coordinator(tmp_path)[0].idle
    idle.ahead.begin(iter([requests(10, 11)]))
    assert idle.for_free_slots() == ()
    idle.supervisor.capacity.leave_out(1, "it was lost")
    assert idle.for_free_slots() == requests(10, 11)


def test_look_ahead_drafts_are_dropped_after_use() -> None:
    ahead = looking(known(0, 5), known(10, 7))
    ahead.end(RolloutStats(), responses(0, 0, 1), 0)
    assert [ahead.store.length(seed) for seed in (0, 10)] == [0, 7]
    ahead.end(RolloutStats(), responses(0, 10), 0)
    assert ahead.store.length(10) == 0


def responses(epoch: int, *seeds: int) -> list[Response]:
    return [Response(replace(request(seed), epoch=epoch), [seed, 7], [], [], "stop") for seed in seeds]


def test_the_last_responses_to_a_prompt_are_sent_with_its_requests() -> None:
    ahead = ComingRequests(3, 2, history_tokens=100)
    ahead.begin(iter([requests(2)]))
    ahead.end(RolloutStats(), responses(0, 0, 1, 10), version=0)
    assert [(a.seed, a.tokens.tolist()) for a in ahead.drafts(requests(3))] == [(0, [0, 7]), (1, [1, 7])]
    ahead.store.put([known(3), known(4)])
    assert [a.seed for a in ahead.drafts(requests(3))] == [0, 1, 3, 4], "with its look-ahead drafts"
    ahead.begin(iter([requests(2)]))
    work = ahead.work(0, 1, 1)
    assert work
    assert [a.seed for a in work.drafts] == [0, 1, 3, 4], "to workers that look ahead, too"
    ahead.end(RolloutStats(), responses(1, 5), version=1)
    assert [a.seed for a in ahead.drafts(requests(3, 11))] == [5, 3, 4, 10]


def test_responses_of_an_evaluation_are_drafts_of_the_next() -> None:
    """Its requests are repeated, and it is known which of them take long."""
    ahead = ComingRequests(3, 2, history_tokens=100)
    decoded = [Response(request(seed), [1] * length, [], [], "stop") for seed, length in ((0, 2), (10, 9))]
    ahead.end(RolloutStats(), decoded, version=0)
    assert {a.seed for a in ahead.drafts(requests(0, 10))} == {0, 10}
    assert dealt(ahead, [0, 10], 2) == [10, 0]


def test_drafts_include_those_of_siblings_each_once() -> None:
    ahead = looking(known(0), known(1), known(10), known(20))
    assert [a.seed for a in ahead.drafts(requests(1, 1, 11))] == [1, 0, 10]


def dealt(ahead: ComingRequests, given: Sequence[int], workers: int) -> list[int]:
    return [row.request.seed for row in ahead.in_even_parts([Row(request) for request in requests(*given)], workers)]


def test_rows_are_dealt_by_their_expected_rounds() -> None:
    """A token with a look-ahead draft takes 1/5 of a round, and any other 1/2. The mean length of 50 and 20 is 35.

    Request 0 has ended: 50/5 = 10. Request 1 has not: 20/5 + 35/2 = 21.5. Request 2 is unknown: 35/2 = 17.5. Requests
    10 and 20 have ended: 100/5, 80/5. Request 30 has not, and is the only one: 30/5 + 30/2 = 21. Nothing is known of
    40: 0."""
    ahead = looking(known(0, 50), known(1, 20, ended=False), known(10, 100), known(20, 80), known(30, 30, ended=False))
    ahead.accept_length, ahead.accept_length_ahead = 2.0, 5.0
    given = [40, 0, 20, 2, 10, 30, 1]
    assert dealt(ahead, given, len(given)) == [1, 30, 10, 2, 20, 0, 40]
    assert dealt(looking(), [10, 11, 0, 12, 1], 2) == [10, 11, 0, 12, 1], "without estimates the order is kept"
    some = looking(known(0, 50), known(10, 20), known(1, 10))
    assert dealt(some, [0, 10, 1, 11], 2) == [0, 1, 10, 11], "rows of a worker's prompt follow each other"


@given(
    rows=st.lists(st.integers(0, 39), unique=True, min_size=1),
    found=st.dictionaries(st.integers(0, 39), st.tuples(st.integers(0, 99), st.booleans())),
    workers=st.integers(1, 5),
)
def test_each_row_is_dealt_once(rows: list[int], found: dict[int, tuple[int, bool]], workers: int) -> None:
    ahead = looking(*(known(seed, length, ended) for seed, (length, ended) in found.items()))
    assert sorted(dealt(ahead, rows, workers)) == sorted(rows)


@pytest.mark.parametrize(
    ("stats", "plain", "ahead"),
    [
        (RolloutStats(tokens=100, row_passes=30, ahead_passes=10, ahead_committed=60), 2.0, 6.0),
        (RolloutStats(tokens=90, row_passes=20, ahead_passes=10, ahead_committed=30), 6.0, 3.0),
        # eight tokens by a look-ahead, the last of them the stop, in one pass; and one token in another
        (RolloutStats(tokens=9, row_passes=2, ahead_passes=1, ahead_committed=8), 1.0, 8.0),
        (RolloutStats(), 1.0, 1.0),
    ],
)
def test_tokens_per_pass_with_and_without_look_ahead(stats: RolloutStats, plain: float, ahead: float) -> None:
    found = looking()
    found.end(stats, [], 0)
    assert (found.accept_length, found.accept_length_ahead) == (plain, ahead)


@dataclass
class Puppet:
    """Worker that decodes everything at once. Its look-ahead responses end with five tokens."""

    index: int
    trace: list[tuple[int, str, Any]]

    def decode(self, work: DecodeWork, seconds: float) -> Slice:
        self.trace.append((self.index, "decode", work))
        responses = [Response(request, [1, 2], [0.0] * 2, [0.0] * 2, "stop") for request in work.requests]
        stats = RolloutStats(tokens=2 * len(responses), seconds={"prefill": 0.0})
        return Slice(responses, stats, {}, {})

    def look_ahead(self, work: AheadWork, seconds: float, number: float) -> list[Ahead]:
        self.trace.append((self.index, "look_ahead", work))
        return [known(request.seed, 5) for request in work.requests]

    def interrupt(self, number: float) -> None:
        self.trace.append((self.index, "interrupt", number))

    def release(self) -> None: ...

    def rendezvous(self) -> str:
        return "here"

    def update(self, batch: TrainBatch, step: int, *group: Any) -> dict[str, float]:
        self.trace.append((self.index, "update", step))
        return {"loss": 0.0}


class Watched(TestPool):
    """Supervisor that records which calls are running when a call is made."""

    under_way: list[tuple[str, list[str]]]

    def submit(self, index: int, method: str, *arguments: Any) -> Handle:
        waiting = [call.method for call in self.calls.values() if not call.done]
        self.under_way = [*getattr(self, "under_way", []), (method, waiting)]
        return super().submit(index, method, *arguments)


def watched_coordinator(folder: Path) -> tuple[Coordinator, Watched, list[tuple[int, str, Any]]]:
    """Return a coordinator of two workers with four slots each, its pool, and a list of its calls. The workers take
    turns."""
    turn = count()
    trace: list[tuple[int, str, Any]] = []
    config = tiny_config(
        folder,
        cluster={"workers": 2},
        speculation={"drafter": "adaptive", "look_ahead": 2, "training": {"idle": False}},
    )
    pool = Watched(2, lambda index: Puppet(index, trace), lambda n: next(turn))
    return Coordinator(Supervisor(pool), config), pool, trace


def rolled_out(coordinator: Coordinator, given: list[Request], *coming: list[Request]) -> RolloutStats:
    responses, stats = coordinator.generate(given, lambda response: None, coming)
    assert sorted(r.request.seed for r in responses) == [r.seed for r in given]
    return stats


def test_idle_workers_decode_the_next_step_while_rewards_are_computed(tmp_path: Path) -> None:
    coordinator, pool, _ = watched_coordinator(tmp_path)
    coordinator._pause = 60.0
    rolled_out(coordinator, requests(0, 1, 10, 11), requests(20, 21, 30, 31), requests(40, 41))
    calls = [call for call in pool.calls.values() if call.method == "look_ahead"]
    assert [(call.worker, seeds(call.arguments[0]), call.done) for call in calls] == [
        (0, [20, 30, 40, 21], False),
        (1, [31, 41], False),
    ]


def test_no_update_begins_while_a_worker_decodes_ahead(tmp_path: Path) -> None:
    """So a worker that hangs is replaced before the others wait for it in a joint sum."""
    coordinator, pool, trace = watched_coordinator(tmp_path)
    rolled_out(coordinator, requests(0, 1), requests(20, 21))
    assert coordinator.supervisor.calls.of_worker(0) + coordinator.supervisor.calls.of_worker(1) == ["look_ahead"]
    trace.clear()
    pool.under_way = []
    coordinator.release()
    ClusterPolicy(coordinator.supervisor).update(TrainBatch([], [], [], []), 1)
    methods = [method for _, method, _ in trace]
    assert methods.index("interrupt") < methods.index("look_ahead") < methods.index("update"), "it is wanted at once"
    assert [method for method, _ in pool.under_way] == ["release", "release", "rendezvous", "update", "update"]
    assert not any("look_ahead" in waiting for _, waiting in pool.under_way)


def test_tokens_of_a_lost_worker_are_followed_by_the_rest_of_a_longer_draft() -> None:
    ahead, row = looking(Ahead(0, (0,), np.array([1, 2, 3, 4, 5], dtype=np.int32), 0, True)), Row(request(0), [1])
    for lost, tokens, kept in ((row, [1, 9, 3], [1, 9, 3, 4, 5]), (Row(request(1)), [7, 8], [7, 8])):
        ahead.store.put_row(replace(lost, tokens=tokens), version=7)
        found = ahead.store.get(lost.request)
        assert found
        assert (found.tokens.tolist(), found.version, found.ended) == (kept, 7, False)
    assert row.tokens == [1], "the row is decoded again from where it stood"


def test_look_ahead_requests_of_a_lost_worker_are_assigned_again(tmp_path: Path) -> None:
    idle = watched_coordinator(tmp_path)[0].idle
    idle.ahead.begin(iter([requests(10, 11)]))
    assert seeds(idle.ahead.work(0, 1, 1)) == [10, 11]
    idle.handle(Done(0, "look_ahead", None, lost=True))
    assert seeds(idle.ahead.work(1, 1, 1)) == [10, 11]


def test_idle_workers_do_nothing_else_than_help_during_a_comparison(tmp_path: Path) -> None:
    """Other work would slow the workers whose time is compared."""
    idle, asked = watched_coordinator(tmp_path)[0].idle, list[str]()
    for part, name in ((idle.training, "next_call"), (idle.ahead, "work")):
        setattr(part, name, lambda *arguments, part=part: asked.append(type(part).__name__))
    idle.is_on = False
    idle.start(0)
    assert asked == []
    idle.is_on = True
    idle.start(0)
    assert asked == ["DrafterTraining", "ComingRequests"]


def test_results_of_interrupted_work_are_known_before_the_update(tmp_path: Path) -> None:
    coordinator, _, _ = watched_coordinator(tmp_path)
    rolled_out(coordinator, requests(0, 1), requests(20, 21))
    assert not coordinator.idle.ahead.store.has_ended(request(21))
    coordinator.idle.end_all()
    assert coordinator.supervisor.calls.of_worker(0) == coordinator.supervisor.calls.of_worker(1) == []
    assert all(coordinator.idle.ahead.store.has_ended(r) for r in requests(20, 21))


def test_extra_training_takes_its_share_of_the_rollout(tmp_path: Path) -> None:
    idle, left = watched_coordinator(tmp_path)[0].idle, list[float]()
    setattr(idle, "train_for", lambda remaining: left.append(remaining()))  # noqa: B010
    for extra in (0.0, 0.25):
        idle.training.extra = extra
        idle.train_longer(40.0)
    assert left == [pytest.approx(10.0, abs=1.0)]


# -- rest --------------------------------------------------------------------------------------------------------------


def judged(share: float, seconds: float, others_work: bool = True) -> Crowding:
    """Return the judgement after decoding for `seconds`, of which `share` was spent waiting for a core."""
    found = Crowding()
    for _ in range(round(seconds / SLICE)):
        found.decoded(SLICE, share * SLICE, others_work)
    return found


@pytest.mark.parametrize(
    ("share", "seconds", "others_work", "rests"),
    [
        (0.33, 1.0, True, True),  # one other process on two cores
        (0.33, 0.8, True, False),  # too short for a judgement
        (0.03, 60.0, True, False),  # enough cores, although the driver needs one now and then
        (0.5, 60.0, False, False),  # the workers wait, but not because of idle work
    ],
)
def test_idle_work_rests_if_decoding_waits_for_cores(
    share: float, seconds: float, others_work: bool, rests: bool
) -> None:
    assert judged(share, seconds, others_work).rests == rests


def test_idle_work_is_tried_again_for_a_twentieth_of_the_time() -> None:
    found, rested = Crowding(), 0
    for _ in range(2100):
        rested += found.rests
        found.decoded(SLICE, 0.4 * SLICE, not found.rests)
    assert rested == 2000


def test_one_slow_slice_is_no_judgement_on_the_next_second() -> None:
    found = judged(0.14, 1.0)
    for _ in range(4):
        found.decoded(SLICE, SLICE, True)
    assert not found.rests
    found.decoded(SLICE, SLICE, True)
    assert found.rests


def idle_work(folder: Path, method: str = "look_ahead", **cluster: Any) -> tuple[IdleWork, list[str]]:
    """Return the idle work of two workers, and the kinds that it has started. Worker 1 runs a call of `method`."""
    config = tiny_config(folder, cluster={"workers": 2, **cluster})
    idle, started = Coordinator(Supervisor(TestPool(2, lambda index: None)), config).idle, list[str]()

    def start(name: str, possible: bool, *arguments: Any) -> bool:
        started.append(name)
        return possible

    for name in ("train", "decode_ahead"):
        setattr(idle, name, partial(start, name, name == "decode_ahead"))
    idle.supervisor.call(1, method)
    return idle, started


def decode(idle: IdleWork, waited: float) -> None:
    for _ in range(10):
        idle.handle(Done(0, "decode", Slice([], RolloutStats(), {}, {}, seconds=SLICE, waited=waited)))


@pytest.mark.parametrize("method", ["look_ahead", "train_drafter", "evaluate_drafter"])
def test_idle_work_rests_while_it_takes_cores(method: str, tmp_path: Path) -> None:
    idle, started = idle_work(tmp_path, method)
    decode(idle, waited=0.0)
    idle.start(1)
    assert started == ["train", "decode_ahead"]
    started.clear()
    decode(idle, waited=0.3 * SLICE)
    idle.start(1)
    assert started == []


def test_workers_on_other_machines_take_no_cores(tmp_path: Path) -> None:
    idle, started = idle_work(tmp_path, address="10.0.0.1:6379")
    decode(idle, waited=0.3 * SLICE)
    idle.start(1)
    assert "decode_ahead" in started
