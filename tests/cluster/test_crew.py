"""Calls to workers, one of which does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from typing import Any

import pytest
from pools import StandIn

from tlt.cluster.crew import Crew, Done
from tlt.cluster.deadlines import Deadlines
from tlt.cluster.pool import ClusterError, WorkerLost
from tlt.rl.parallel import Broken


class OneThatHangs(StandIn):
    """Pool in which worker 1 never answers, and worker 0 waits for worker 1 in an update. A replacement of worker 1
    answers."""

    def __init__(self) -> None:
        super().__init__()
        self._methods: list[str] = []
        self._calls: list[int] = []

    def submit(self, index: int, method: str, *arguments: Any) -> int:
        self._calls.append(index)
        self._methods.append(method)
        return len(self._calls) - 1

    def wait(self, handles: Collection[int], timeout: float | None = None) -> list[int]:
        done = [handle for handle in handles if self._is_done(handle)]
        if not done:
            time.sleep(min(timeout or 0.0, 0.01))
        return done

    def _is_done(self, handle: int) -> bool:
        there = 1 in self.replaced
        return there or (self._calls[handle] == 0 and self._methods[handle] != "update")

    def result(self, handle: int) -> Any:
        return Broken("connection closed") if self._methods[handle] == "update" else "done"

    def updated(self, index: int, seconds: float) -> float | None:
        return None if index == 1 and 1 not in self.replaced else 0.0

    def last_log_line(self, index: int) -> str:
        return f"worker_{index}.log ends with: the disk is gone"


def test_a_worker_that_hangs_is_noticed_while_another_keeps_answering() -> None:
    pool = OneThatHangs()
    crew = Crew(pool, patience=0.1)
    crew.call(1, "decode")
    heard: list[Done] = []
    until = time.monotonic() + 30
    while not pool.replaced and time.monotonic() < until:
        if not crew.pending(0):
            crew.call(0, "decode")
        heard += crew.done()
    assert pool.replaced == [1]
    assert Done(1, "decode", None, lost=True) in heard


@pytest.mark.parametrize("method", ["save", "sha256", "decode", "rendezvous"])
def test_every_call_has_a_deadline(method: str) -> None:
    """A long call that has never ended has twelve times the patience."""
    pool = OneThatHangs()
    crew = Crew(pool, patience=0.02)
    assert crew.call_all(method) == {0: "done", 1: "done"}
    assert pool.replaced == [1]
    assert crew.trouble.startswith(f"worker 1 was lost during {method} (no answer for 0 s; worker_1.log ends with: the")


def test_an_error_of_a_worker_names_the_worker() -> None:
    class Raises(OneThatHangs):
        def result(self, handle: int) -> Any:
            raise MemoryError("no more")

    with pytest.raises(MemoryError) as raised:
        Crew(Raises()).call_one("save")
    assert raised.value.__notes__ == ["raised by worker 0 during save"]


def test_the_silent_worker_of_a_hanging_joint_call_is_replaced() -> None:
    """All workers are late, because they wait for one."""
    pool = OneThatHangs()
    crew = Crew(pool, patience=0.02)
    assert crew.call_jointly("update", {0: (), 1: ()}) is None
    assert pool.replaced == [1]
    assert crew.trouble == "connection closed"


def test_a_worker_that_answers_late_in_a_broken_joint_call_is_not_lost() -> None:

    class Slowly(OneThatHangs):
        ends = 0.0

        def replace(self, index: int) -> None:
            super().replace(index)
            self.ends = time.monotonic() + 0.6

        def _is_done(self, handle: int) -> bool:
            return super()._is_done(handle) and not (self._calls[handle] == 0 and time.monotonic() < self.ends)

    pool = Slowly()
    assert Crew(pool, patience=0.02).call_jointly("update", {0: (), 1: ()}) is None
    assert pool.replaced == [1]


def test_if_all_late_workers_answer_one_of_them_is_replaced() -> None:
    """The cause is unknown. It may be their network."""

    class AllThere(OneThatHangs):
        def updated(self, index: int, seconds: float) -> float | None:
            return 0.5

    pool = AllThere()
    assert Crew(pool, patience=0.02).call_jointly("update", {0: (), 1: ()}) is None
    assert pool.replaced == [1]


def test_a_worker_that_waits_for_the_state_of_a_hanging_one_is_not_replaced() -> None:
    class OneAndHalfOfAnother(OneThatHangs):
        """Pool that loses worker 1 at once. Worker 0, whose state is requested, stops answering until it is
        replaced."""

        size = 3

        def _is_done(self, handle: int) -> bool:
            index, method = self._calls[handle], self._methods[handle]
            waits = method == "state" or (method == "take_state" and self.replaced == [1])
            return 0 in self.replaced or not (index == 0 or waits)

        def result(self, handle: int) -> Any:
            if self._methods[handle] == "die":
                raise WorkerLost("its process is gone")
            return super().result(handle)

    pool = OneAndHalfOfAnother()
    crew = Crew(pool, patience=0.02)
    crew.call(1, "die")
    crew.done()
    assert pool.replaced == [1]
    crew.wait_until_ready()
    assert pool.replaced == [1, 0]


def test_a_deadline_follows_the_recent_durations_of_a_call() -> None:
    deadlines = Deadlines(patience=5.0)
    assert (deadlines.seconds("decode"), deadlines.seconds("update")) == (5.0, 60.0)
    deadlines.took("update", 0.1)
    assert deadlines.seconds("update") == 5.0
    deadlines.took("update", 40.0)
    deadlines.took("update", 0.5)
    assert deadlines.seconds("update") == 400.0
    for _ in range(5):
        deadlines.took("update", 2.0)
    assert deadlines.seconds("update") == 20.0
    assert deadlines.seconds("save") == 60.0


class NoPlace(OneThatHangs):
    """Pool that loses worker 1 at once. A replacement is pending until there is room, and then answers."""

    def __init__(self) -> None:
        super().__init__()
        self.room = False
        self.given: list[Any] = []

    def submit(self, index: int, method: str, *arguments: Any) -> int:
        if method == "take_state":
            self.given.append(arguments[0])
        return super().submit(index, method, *arguments)

    def has_begun(self, index: int) -> bool:
        return index == 0 or self.room or not self.replaced

    def _is_done(self, handle: int) -> bool:
        return self._calls[handle] == 0 or self._methods[handle] == "die" or self.room

    def result(self, handle: int) -> Any:
        if self._methods[handle] == "die":
            raise WorkerLost("its node is gone")
        return handle


def lost(pool: NoPlace, **options: Any) -> Crew:
    crew = Crew(pool, patience=0.02, **options)
    crew.call(1, "die")
    assert crew.done() == [Done(1, "die", None, lost=True)]
    return crew


def test_lost_capacity_is_logged_and_the_run_continues_without_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline does not count meanwhile. When there is room, the new worker takes the present state."""
    monkeypatch.setattr("tlt.cluster.capacity._LOG_AFTER", 0.05)
    monkeypatch.setattr("tlt.cluster.capacity._POLL_EVERY", 0.0)
    pool = NoPlace()
    crew = lost(pool, grace=0.5)
    began = time.monotonic()
    crew.wait_until_ready()
    assert 0.4 < time.monotonic() - began < 5
    assert pool.replaced == [1]
    told = [record.getMessage() for record in caplog.records]
    assert "worker 1 has not started after 0 s (there is room for 1); its timeout is 0.5 s (cluster.grace)" in told
    assert told[-1].startswith("1 of 2 workers are left, and the run continues with them: worker 1 has not started")
    assert crew.call_all("sync").keys() == {0}
    crew.readmit()
    assert crew.present == [0]
    pool.room = True
    crew.readmit()
    crew.wait_until_ready()
    assert crew.ready == {0, 1}
    assert len(pool.given) == 2
    assert pool.given[0] != pool.given[1], "the state of long ago"


def test_too_few_workers_end_the_run() -> None:
    crew = lost(NoPlace(), grace=0.05, least=2)
    with pytest.raises(
        ClusterError, match=r"1 of 2 workers are left, but the run needs 2 \(cluster.min_workers\): worker"
    ):
        crew.wait_until_ready()


def test_a_worker_that_is_lost_often_is_restarted_after_growing_pauses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Dies(OneThatHangs):
        """Pool whose worker 1 answers all calls but one."""

        def _is_done(self, handle: int) -> bool:
            return True

        def result(self, handle: int) -> Any:
            if self._methods[handle] == "die":
                raise WorkerLost("its node has no memory")
            return {}

    pool = Dies()
    crew = Crew(pool, patience=1e9)

    def dies(times: int) -> None:
        for _ in range(times):
            crew.wait_until_ready()
            crew.call(1, "die")
            before = len(pool.replaced)
            while len(pool.replaced) == before:
                crew.done()

    def pause() -> float:
        began = now[0]
        while 1 not in crew.present:
            now[0] += 1.0
            crew.readmit()
        return now[0] - began

    dies(3)
    assert crew.present == [0, 1]
    dies(1)
    assert crew.present == [0]
    assert 30 <= pause() <= 32
    dies(1)
    assert 60 <= pause() <= 62
    dies(1)
    assert 120 <= pause() <= 122
    crew.wait_until_ready()
    crew.call_all("update")
    dies(4)
    assert 30 <= pause() <= 32
    last = [record.getMessage() for record in caplog.records if "is tried again" in record.getMessage()][2]
    assert last.startswith(
        "1 of 2 workers are left, and the run continues with them; worker 1 is tried again in 120 s: "
    )
    assert (
        "worker 1 was lost 6 times in a row; worker 1 was lost during die (its node has no memory; worker_1.log" in last
    )


def test_a_replacement_that_cannot_start_does_not_end_the_run() -> None:
    class NoModel(NoPlace):
        def result(self, handle: int) -> Any:
            if self._methods[handle] == "take_state":
                raise ValueError("there is no model on this node")
            return super().result(handle)

    pool = NoModel()
    pool.room = True
    crew = lost(pool, grace=60.0)
    crew.wait_until_ready()
    assert crew.ready == {0}
    assert "there is no model on this node" in crew.trouble


class Scripted(StandIn):
    """Three workers that answer all calls at once, except those in `slow`. A first worker is lost in a decode call, and
    a worker in `dead` is lost in any call."""

    size = 3

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, str, int]] = []  # worker, method and how often it was replaced by then
        self.dead: set[int] = set()
        self.slow: set[tuple[int, str]] = set()
        self.newest_first = False

    def submit(self, index: int, method: str, *arguments: Any) -> int:
        self.calls.append((index, method, self.replaced.count(index)))
        return len(self.calls) - 1

    def wait(self, handles: Collection[int], timeout: float | None = None) -> list[int]:
        done = [handle for handle in handles if self.calls[handle][:2] not in self.slow]
        if not done:
            time.sleep(0.01)
        return done[::-1] if self.newest_first else done

    def result(self, handle: int) -> Any:
        index, method, life = self.calls[handle]
        if method == "take_state" and self.replaced.count(index) == 1 and self.dead - {*self.replaced}:
            raise WorkerLost("who was to give its state is gone")
        if (index in self.dead and index not in self.replaced) or (method == "decode" and life == 0):
            raise WorkerLost("its process is gone")
        if method == "logprobs":
            raise MemoryError(f"out of memory on worker {index}")
        return method

    def has_begun(self, index: int) -> bool:
        return index not in self.replaced or bool(self.dead)


def test_a_loss_noticed_while_waiting_for_its_state_leaves_no_worker_out() -> None:
    """Worker 0 is lost and takes the state of worker 1, which is lost too and replaced."""
    pool: Any = Scripted()
    crew = Crew(pool, patience=0.5)
    crew.call(0, "decode")
    crew.done()
    pool.dead = {1}
    results: dict[int, Any] = {}
    waits = threading.Thread(target=lambda: results.update(crew.call_all("trace")), daemon=True)
    waits.start()
    waits.join(20.0)
    assert results == dict.fromkeys(range(3), "trace")
    assert pool.replaced == [0, 1, 0]


def test_two_workers_without_room_end_the_run_once() -> None:
    pool: Any = Scripted()
    crew = Crew(pool, patience=100.0, least=3, grace=0.05)
    crew.call(1, "decode")
    crew.call(2, "decode")
    assert [(done.worker, done.lost) for done in crew.done()] == [(1, True), (2, True)]
    time.sleep(0.1)
    with pytest.raises(ClusterError, match="1 of 3 workers are left, but the run needs 3"):
        crew.done()
    assert crew.call_all("rollback") == {0: "rollback"}
    assert crew.call_one("tuner_state") == "tuner_state"


def test_a_call_returns_when_one_worker_has_the_answer() -> None:
    pool: Any = Scripted()
    pool.slow = {(0, "decode"), (0, "tuner_state")}
    crew = Crew(pool, patience=60.0)
    crew.call(0, "decode")
    assert crew.call_one("tuner_state") == "tuner_state"
    assert crew.pending(0) == ["decode"]


def test_answers_that_arrive_together_are_kept() -> None:
    pool: Any = Scripted()
    pool.newest_first = True
    crew = Crew(pool, patience=60.0)
    for index in (1, 2, 0):
        crew.call(index, "sync" if index else "judge")
    assert crew.call_one("tuner_state") == "tuner_state"
    crew.wait_until_ready()
    assert {(done.worker, done.method) for done in crew.take_kept()} == {(1, "sync"), (2, "sync"), (0, "judge")}


def test_errors_of_several_workers_end_the_run_once() -> None:
    pool: Any = Scripted()
    crew = Crew(pool, patience=60.0)
    with pytest.raises(MemoryError, match="on worker 0"):
        crew.call_all("logprobs")
    assert crew.call_all("rollback") == dict.fromkeys(range(3), "rollback")


class OneAfterTheOther(Scripted):
    """Pool whose workers run one call after another. Sending the state takes 0.8 s, and all other calls nearly nothing.
    No worker hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def submit(self, index: int, method: str, *arguments: Any) -> int:
        own = [end for end, (i, _, _) in zip(self.ends, self.calls, strict=True) if i == index]
        given = [self.ends[handle] for handle in arguments if isinstance(handle, int)]
        began = max([time.monotonic(), *own[-1:], *given])
        self.ends.append(began + (0.8 if method == "state" else 0.01))
        return super().submit(index, method, *arguments)

    def wait(self, handles: Collection[int], timeout: float | None = None) -> list[int]:
        time.sleep(0.005)
        return [handle for handle in handles if self.ends[handle] <= time.monotonic()]

    def has_begun(self, index: int) -> bool:
        return True

    def result(self, handle: int) -> Any:
        index, method, life = self.calls[handle]
        if (index, method, life) == (1, "decode", 0):
            raise WorkerLost("its process is gone")
        return method


def test_a_worker_that_sends_its_state_is_not_late() -> None:
    pool: Any = OneAfterTheOther()
    crew = Crew(pool, patience=0.4)
    lost: list[int] = []
    while "take_state" not in crew.pending(1):
        crew.call(1, "decode")
        lost += [done.worker for done in crew.done() if done.lost]
    while crew.pending(1):
        for index in crew.free():
            crew.call(index, "sync")
        lost += [done.worker for done in crew.done() if done.lost]
    assert lost == [1]
