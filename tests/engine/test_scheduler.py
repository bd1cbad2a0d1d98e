"""Admission, growth, preemption and finishing in any order: the bound holds, and no request is lost, doubled or
overtaken."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small import ANY_SIZE

from tlt.attention.slot_memory import HeadShape
from tlt.attention.slots import SlotAttention
from tlt.engine.kv_cache import KVCache
from tlt.engine.rows import RowTable
from tlt.engine.scheduler import Scheduler
from tlt.types import Prompt, Request, Row, SamplingParams


def scheduler_of(bound_tokens: int, max_rows: int, new: int, max_positions: int = 4096) -> Scheduler:
    store = SlotAttention(HeadShape(1, 1, 1, 2, torch.float64, torch.device("cpu")))
    store.key_counts = ANY_SIZE
    cache = KVCache(store, bound_tokens)
    return Scheduler(RowTable([cache]), cache, max_rows, 512, new, max_positions)


def admit(scheduler: Scheduler, most_ahead: int = 0) -> list[Row]:
    """Admit rows as the engine does, without its computation for them."""
    admitted = scheduler.admit(most_ahead)
    for row in admitted:
        scheduler.rows.append(row)
    return admitted


def request(number: int, prompt_tokens: int, new_tokens: int) -> Request:
    prompt = Prompt(number, "", (1,) * prompt_tokens)
    return Request(prompt, 0, 0, number, SamplingParams(max_new_tokens=new_tokens))


class SchedulerMachine(RuleBasedStateMachine):
    """State machine in the place of the engine."""

    @initialize(bound=st.integers(60, 500), max_rows=st.integers(1, 6), new=st.integers(1, 12))
    def start(self, bound: int, max_rows: int, new: int) -> None:
        self.new = new
        self.scheduler = scheduler_of(bound, max_rows, new)
        self.cache, self.rows = self.scheduler.cache, self.scheduler.rows
        self.submitted = 0
        self.finished: list[int] = []
        self.first_admissions: list[int] = []

    @rule(sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=5))
    def submit(self, sizes: list[tuple[int, int]]) -> None:
        fits = [(p, n) for p, n in sizes if p + n + self.scheduler.headroom <= self.cache.bound_tokens]
        self.scheduler.submit([request(self.submitted + i, p, n) for i, (p, n) in enumerate(fits)])
        self.submitted += len(fits)

    @precondition(lambda self: self.scheduler.waiting or self.rows)
    @rule(growth=st.lists(st.integers(1, 12), min_size=6, max_size=6))
    def one_round(self, growth: list[int]) -> None:
        line, last_step = list(self.scheduler.waiting), list(self.rows)
        admitted = admit(self.scheduler)
        assert admitted == line[: len(admitted)], "admission is in order"
        before = list(self.rows)
        assert before == last_step + admitted
        self.first_admissions += [row.request.seed for row in admitted if not row.tokens]
        left = self.scheduler.make_room(self.new)
        stay = len(before) - left
        assert list(self.rows) == before[:stay], "the last rows leave"
        assert list(self.scheduler.waiting)[:left] == before[stay:], "those that left stand first in line, in order"
        assert self.rows, "something always runs"
        for slot, row in reversed(list(enumerate(self.rows))):
            room = row.request.sampling.max_new_tokens - len(row.tokens)
            row.tokens += [0] * min(growth[slot], self.new, room)
            if len(row.tokens) == row.request.sampling.max_new_tokens:
                self.finish(slot)

    def finish(self, slot: int) -> None:
        self.finished.append(self.rows[slot].request.seed)
        self.rows.remove(slot)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def stop_early(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.integers(0, len(self.rows) - 1)))

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            while self.scheduler.waiting or self.rows:
                self.one_round([self.new] * 6)
            assert sorted(self.finished) == list(range(self.submitted))

    @invariant()
    def the_bounds_hold(self) -> None:
        store = self.cache.store
        assert store.slots * store.tokens <= self.cache.bound_tokens
        assert len(self.rows) <= min(self.scheduler.max_rows, max(store.slots, 0))
        assert all(row.kv_length <= store.tokens for row in self.rows)

    @invariant()
    def nothing_is_lost_doubled_or_overtaken(self) -> None:
        everywhere = [row.request.seed for row in (*self.scheduler.waiting, *self.rows)] + self.finished
        assert sorted(everywhere) == list(range(self.submitted))
        # a fresh request waits behind those that were preempted, so it may be admitted twice without a token
        first_time = list(dict.fromkeys(self.first_admissions))
        assert first_time == sorted(first_time)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=25)


@pytest.mark.parametrize(
    ("prompt_tokens", "new_tokens", "says"),
    [
        (0, 5, "prompt 3 is empty"),
        (5, 0, "at least 1"),
        (50, 51, "prompt 3 .* 101 tokens"),
        (20, 50, r"engine\.kv_memory_mb"),
    ],
    ids=["empty", "no room", "past the model's positions", "past the cache"],
)
def test_a_request_that_can_never_run_is_refused_before_any_is_queued(
    prompt_tokens: int, new_tokens: int, says: str
) -> None:
    scheduler = scheduler_of(100, max_rows=2, new=1, max_positions=100)
    with pytest.raises(ValueError, match=says) as caught:
        scheduler.submit([request(1, 3, 3), request(3, prompt_tokens, new_tokens)])
    assert "\n" not in str(caught.value)
    assert not scheduler.waiting


def test_the_largest_request_that_fits_runs_to_its_end() -> None:
    scheduler = scheduler_of(100, max_rows=2, new=4)
    scheduler.submit([request(1, 8, 100 - 8 - scheduler.headroom)])
    (row,) = admit(scheduler)
    while len(row.tokens) < row.request.sampling.max_new_tokens:
        assert scheduler.make_room(4) == 0
        row.tokens.append(0)


@pytest.mark.parametrize(("most", "begun"), [(16, [0, 0, 0, 4]), (8, [0, 2, 0, 2]), (3, [1, 1, 1, 1])])
def test_rows_of_coming_steps_begin_a_few_together(most: int, begun: list[int]) -> None:
    """A prefill of one row takes as long as one of four. A row ends before each round."""
    scheduler = scheduler_of(bound_tokens=4096, max_rows=32, new=1)
    scheduler.look_ahead({number: Row(request(number, 2, 8), ahead=True) for number in range(40)}, most)
    while len(scheduler.rows) < most:
        admit(scheduler, most)
    for expected in begun:
        scheduler.rows.remove(0)
        assert len(admit(scheduler, most)) == expected


def test_a_round_prefills_few_tokens_of_look_ahead_rows() -> None:
    """A prefill cannot be interrupted, and the worker may be needed."""
    scheduler = scheduler_of(bound_tokens=40_000, max_rows=32, new=1)
    lengths = (100, 20, 120, 600, 10)  # prefill_tokens / 4 are 128
    rows = {n: Row(request(n, 2, 700), [0] * length, ahead=True) for n, length in enumerate(lengths)}
    scheduler.look_ahead(rows, most=16)
    assert [[row.request.seed for row in admit(scheduler, 16)] for _ in range(4)] == [[0, 1], [2], [3], [4]]


def test_admission_counts_the_longest_row() -> None:
    scheduler = scheduler_of(bound_tokens=150, max_rows=8, new=1)
    scheduler.submit([request(1, 80, 8), request(2, 2, 8)])
    assert [row.request.seed for row in admit(scheduler)] == [1], "two rows as long as the first do not fit"


def test_a_withdrawn_request_leaves_but_a_look_ahead_row_of_its_seed_stays() -> None:
    scheduler = scheduler_of(4096, max_rows=8, new=1)
    scheduler.look_ahead({1: Row(request(1, 2, 8), ahead=True)}, most=8)
    admit(scheduler, 8)
    scheduler.submit([request(2, 2, 8), request(3, 2, 8), request(5, 2, 8)])
    admit(scheduler)
    scheduler.submit([request(4, 2, 8)])
    left = scheduler.withdraw([1, 2, 4, 5])
    assert sorted(row.request.seed for row in left) == [2, 4, 5]
    assert [(row.request.seed, row.ahead) for row in scheduler.rows] == [(1, True), (3, False)]
    assert not scheduler.waiting


def test_rows_of_the_rollout_leave_less_room_for_look_ahead_rows() -> None:
    scheduler = scheduler_of(4096, max_rows=8, new=1)
    ahead = {number: Row(request(number, 2, 8), ahead=True) for number in range(3)}
    scheduler.look_ahead(ahead, most=4)
    admit(scheduler, 4)
    scheduler.submit([request(9, 2, 8)])
    admit(scheduler)
    assert len(scheduler.rows) == 4
    scheduler.look_ahead(ahead, most=3)
    assert sorted(row.request.seed for row in scheduler.rows) == [0, 1, 9]
    assert [row.request.seed for row in scheduler.coming] == [2]


def test_a_look_ahead_request_that_can_never_run_is_refused_before_any_row_leaves() -> None:
    scheduler = scheduler_of(100, max_rows=2, new=1)
    scheduler.look_ahead({1: Row(request(1, 3, 3), ahead=True)}, most=2)
    admit(scheduler, 2)
    with pytest.raises(ValueError, match=r"engine\.kv_memory_mb"):
        scheduler.look_ahead({2: Row(request(2, 20, 50), ahead=True)}, most=2)
    assert [row.request.seed for row in scheduler.rows] == [1]
