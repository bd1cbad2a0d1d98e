"""Calls to workers, one of which is lost or does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import pytest
from pools import StandIn

from tlt.cluster.pool import ClusterError, WorkerLost
from tlt.cluster.supervisor import Done, Supervisor
from tlt.rl.parallel import Broken, GroupBroken


class Call(NamedTuple):
    index: int
    method: str
    arguments: tuple[Any, ...]
    life: int
    """how often the worker was replaced before"""


class Scripted(StandIn):
    """Pool whose calls end when `ends` holds, with the result or error of `answers`."""

    def __init__(self, answers: Callable[[Call], Any] = lambda call: call.method, size: int = 2) -> None:
        super().__init__()
        self.answers, self.size, self.room = answers, size, False
        self.ends: Callable[[Call], bool] = lambda call: True
        self.begins: Callable[[int], bool] = lambda index: True
        self.pings: Callable[[int], bool] = lambda index: True
        self.calls: list[Call] = []

    def submit(self, index: int, method: str, *arguments: Any) -> int:
        self.calls.append(Call(index, method, arguments, self.replaced.count(index)))
        return len(self.calls) - 1

    def wait(self, handles: Collection[int], timeout: float | None = None) -> list[int]:
        done = [handle for handle in handles if self.ends(self.calls[handle])]
        if not done:
            time.sleep(min(timeout or 0.0, 0.01))
        return done

    def result(self, handle: int) -> Any:
        found = self.answers(self.calls[handle])
        if isinstance(found, Exception):
            raise found
        return found

    def has_begun(self, index: int) -> bool:
        return self.begins(index)

    def updated(self, index: int, seconds: float) -> float | None:
        return 0.0 if self.pings(index) else None

    def last_log_line(self, index: int) -> str:
        return f"worker_{index}.log ends with: the disk is gone"


def one_that_hangs() -> Any:
    """Return a pool in which worker 1 never answers, and worker 0 waits for it in an update. A replacement of worker 1
    answers."""
    pool = Scripted(lambda call: Broken("connection closed") if call.method == "update" else "done")
    pool.ends = lambda call: 1 in pool.replaced or (call.index == 0 and call.method != "update")
    pool.pings = lambda index: index == 0 or 1 in pool.replaced
    return pool


def test_a_worker_that_hangs_is_noticed_while_another_keeps_answering() -> None:
    pool = one_that_hangs()
    supervisor, heard = Supervisor(pool, patience=0.1), list[Done]()
    supervisor.call(1, "decode")
    until = time.monotonic() + 30
    while not pool.replaced and time.monotonic() < until:
        if not supervisor.calls.of_worker(0):
            supervisor.call(0, "decode")
        heard += supervisor.done()
    assert pool.replaced == [1]
    assert Done(1, "decode", None, lost=True) in heard


@pytest.mark.parametrize("method", ["save", "decode"])
def test_every_call_has_a_deadline(method: str) -> None:
    """A long call that has never ended has twelve times the patience."""
    pool = one_that_hangs()
    supervisor = Supervisor(pool, patience=0.02)
    assert supervisor.call_all(method) == {0: "done", 1: "done"}
    assert pool.replaced == [1]
    assert supervisor.trouble.startswith(
        f"worker 1 was lost during {method} (no answer for 0 s; worker_1.log ends with: the"
    )


@pytest.mark.parametrize("others", ["answer at once", "answer late", "were all late for another reason"])
def test_one_worker_of_a_hanging_joint_call_is_replaced(others: str) -> None:
    """All workers are late, because they wait for the silent one. If all answer a ping, the cause may be their
    network."""
    pool, replaced_at = one_that_hangs(), list[float]()
    ends = pool.ends
    if others == "were all late for another reason":
        pool.pings = lambda index: True
    if others == "answer late":

        def late(call: Call) -> bool:
            replaced_at.extend([time.monotonic()] * (1 in pool.replaced and not replaced_at))
            return ends(call) and (call.index == 1 or time.monotonic() > replaced_at[0] + 0.6)

        pool.ends = late
    supervisor = Supervisor(pool, patience=0.02)
    assert supervisor.call_jointly("update", {0: (), 1: ()}) is None
    assert pool.replaced == [1]
    assert supervisor.trouble == "connection closed"


def test_a_worker_that_still_waits_after_a_loss_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.cluster.supervisor._PATIENCE", 0.1)
    pool: Any = Scripted(lambda call: WorkerLost("gone") if call.method == "update" else "done", size=3)
    pool.ends = lambda call: call.index != 0
    assert Supervisor(pool).call_jointly("update", {0: (), 1: ()}) is None
    assert pool.replaced == [1, 0]


def test_a_worker_that_hangs_is_noticed_after_a_joint_call_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an update worker 0 is lost, then worker 2, which cannot be replaced. Worker 1 hangs."""
    pool = Scripted(lambda call: WorkerLost("gone") if call.index != 1 and call.method == "update" else "done", size=3)
    supervisor, replace, late = Supervisor(pool, patience=0.02), pool.replace, time.monotonic() + 10
    pool.ends = lambda call: (
        (call.index == 0 or call.life > 0 or time.monotonic() > late)
        or (call.index == 2 and (call.method != "update" or supervisor._broken == "update"))
    )
    with monkeypatch.context() as patch:
        patch.setattr(pool, "replace", lambda index: no_room() if index == 2 else replace(index))
        with pytest.raises(ClusterError, match="no room"):
            supervisor.call_jointly("update", {0: (), 1: (), 2: ()})
    assert 1 not in pool.replaced
    assert supervisor.call_all("rollback") == dict.fromkeys(range(3), "done")
    assert 1 in pool.replaced


def no_room() -> None:
    raise ClusterError("no room")


def test_a_worker_that_waits_for_the_state_of_a_hanging_one_is_not_replaced() -> None:
    """Worker 1 is lost at once. Worker 0, whose state is requested, stops answering until it is replaced."""
    pool: Any = Scripted(lambda call: WorkerLost("its process is gone") if call.method == "die" else "done", size=3)

    def ends(call: Call) -> bool:
        waits = call.method == "state" or (call.method == "take_state" and pool.replaced == [1])
        return 0 in pool.replaced or not (call.index == 0 or waits)

    pool.ends = ends
    supervisor = Supervisor(pool, patience=0.02)
    supervisor.call(1, "die")
    supervisor.done()
    assert pool.replaced == [1]
    supervisor.wait_until_ready()
    assert pool.replaced == [1, 0]


def without_room(taken: Any = "done") -> Any:
    """Return a pool that loses worker 1 at once. A replacement is pending until there is room. Then it answers, and
    `taken` is what it returns as it takes the state."""

    def answers(call: Call) -> Any:
        return WorkerLost("its node is gone") if call.method == "die" else taken if call.method == "take_state" else 0

    pool = Scripted(answers)
    pool.ends = lambda call: call.index == 0 or call.method == "die" or pool.room
    pool.begins = lambda index: index == 0 or pool.room or not pool.replaced
    return pool


def lost(pool: Any, **options: Any) -> Supervisor:
    supervisor = Supervisor(pool, patience=0.02, **options)
    supervisor.call(1, "die")
    assert supervisor.done() == [Done(1, "die", None, lost=True)]
    return supervisor


def test_a_run_goes_on_without_lost_capacity(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline does not count meanwhile. When there is room, the new worker takes the present state."""
    monkeypatch.setattr("tlt.cluster.calls._LOG_AFTER", 0.05)
    monkeypatch.setattr("tlt.cluster.calls._POLL_EVERY", 0.0)
    pool = without_room()
    supervisor = lost(pool, grace=0.5)
    began = time.monotonic()
    supervisor.wait_until_ready()
    assert 0.4 < time.monotonic() - began < 5
    assert pool.replaced == [1]
    told = [record.getMessage() for record in caplog.records]
    assert "worker 1 has not started after 0 s (there is room for 1); its timeout is 0.5 s (cluster.grace)" in told
    assert told[-1].startswith("1 of 2 workers are left, and the run continues with them: worker 1 has not started")
    assert supervisor.call_all("sync").keys() == {0}
    supervisor.readmit()
    assert supervisor.present == [0]
    pool.room = True
    supervisor.readmit()
    supervisor.wait_until_ready()
    assert supervisor.ready == {0, 1}
    first, second = (call.arguments for call in pool.calls if call.method == "take_state")
    assert first != second, "the state of long ago"


@pytest.mark.parametrize(
    ("error", "who"),
    [(WorkerLost("its node is gone"), "worker 0"), (GroupBroken("connection closed"), "another worker")],
)
def test_a_worker_lost_with_its_shard_is_an_error_of_one_sentence(error: Exception, who: str) -> None:
    pool: Any = Scripted(lambda call: error)
    with pytest.raises(ClusterError, match=rf"^{who} was lost during save together with its shard of the policy"):
        Supervisor(pool, shards=True).call_all("save")


def test_a_replacement_that_cannot_start_does_not_end_the_run() -> None:
    pool = without_room(ValueError("there is no model on this node"))
    pool.room = True
    supervisor = lost(pool, grace=60.0)
    supervisor.wait_until_ready()
    assert supervisor.ready == {0}
    assert "there is no model on this node" in supervisor.trouble


def test_pauses_of_a_lost_worker_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pool: Any = Scripted(lambda call: WorkerLost("its node has no memory") if call.method == "die" else {})
    supervisor = Supervisor(pool, patience=1e9)

    def dies(times: int) -> None:
        for _ in range(times):
            supervisor.wait_until_ready()
            supervisor.call(1, "die")
            before = len(pool.replaced)
            while len(pool.replaced) == before:
                supervisor.done()

    def pause() -> float:
        began = now[0]
        while 1 not in supervisor.present:
            now[0] += 1.0
            supervisor.readmit()
        return now[0] - began

    dies(3)
    assert supervisor.present == [0, 1]
    dies(1)
    assert supervisor.present == [0]
    assert 30 <= pause() <= 32
    dies(1)
    assert 60 <= pause() <= 62
    dies(1)
    assert 120 <= pause() <= 122
    supervisor.wait_until_ready()
    supervisor.call_all("update")
    dies(4)
    assert 30 <= pause() <= 32


def three_workers() -> Any:
    """Return a pool of three workers that answer at once. Each first worker is lost in a call of `decode`."""
    return Scripted(lambda c: WorkerLost("gone") if c.method == "decode" and not c.life else c.method, size=3)


def test_a_loss_noticed_while_waiting_for_its_state_leaves_no_worker_out() -> None:
    """Worker 0 is lost and takes the state of worker 1, which is lost too and replaced."""
    pool = three_workers()
    answers, dead = pool.answers, set[int]()

    def loses_two(call: Call) -> Any:
        waits_in_vain = call.method == "take_state" and pool.replaced.count(call.index) == 1
        is_lost = call.index in dead and call.index not in pool.replaced
        return WorkerLost("gone") if is_lost or (waits_in_vain and dead - {*pool.replaced}) else answers(call)

    pool.answers, pool.begins = loses_two, lambda index: index not in pool.replaced or bool(dead)
    supervisor = Supervisor(pool, patience=0.5)
    supervisor.call(0, "decode")
    supervisor.done()
    dead.add(1)
    results: dict[int, Any] = {}
    waits = threading.Thread(target=lambda: results.update(supervisor.call_all("trace")), daemon=True)
    waits.start()
    waits.join(20.0)
    assert results == dict.fromkeys(range(3), "trace")
    assert pool.replaced == [0, 1, 0]


def test_two_workers_without_room_end_the_run_once() -> None:
    pool = three_workers()
    pool.begins = lambda index: index not in pool.replaced
    supervisor = Supervisor(pool, patience=100.0, least=3, grace=0.05)
    supervisor.call(1, "decode")
    supervisor.call(2, "decode")
    assert [(done.worker, done.lost) for done in supervisor.done()] == [(1, True), (2, True)]
    time.sleep(0.1)
    with pytest.raises(ClusterError, match="1 of 3 workers are left, but the run needs 3"):
        supervisor.done()
    assert supervisor.call_all("rollback") == {0: "rollback"}
    assert supervisor.call_one("tuner_state") == "tuner_state"


def test_a_call_returns_when_one_worker_has_the_answer() -> None:
    pool = three_workers()
    pool.ends = lambda call: (call.index, call.method) not in {(0, "decode"), (0, "tuner_state")}
    supervisor = Supervisor(pool, patience=60.0)
    supervisor.call(0, "decode")
    assert supervisor.call_one("tuner_state") == "tuner_state"
    assert supervisor.calls.of_worker(0) == ["decode"]


def test_answers_that_arrive_together_are_kept() -> None:
    pool = three_workers()
    wait = pool.wait
    pool.wait = lambda handles, timeout: wait(handles, timeout)[::-1]  # the newest first
    supervisor = Supervisor(pool, patience=60.0)
    for index in (1, 2, 0):
        supervisor.call(index, "sync" if index else "judge")
    assert supervisor.call_one("tuner_state") == "tuner_state"
    supervisor.wait_until_ready()
    assert {(done.worker, done.method) for done in supervisor.take_kept()} == {(1, "sync"), (2, "sync"), (0, "judge")}


def test_errors_of_several_workers_end_the_run_once_with_the_name_of_the_first() -> None:
    pool: Any = Scripted(size=3)
    pool.answers = lambda call: MemoryError(f"on worker {call.index}") if call.method == "logprobs" else call.method
    supervisor = Supervisor(pool, patience=60.0)
    with pytest.raises(MemoryError, match="on worker 0") as raised:
        supervisor.call_all("logprobs")
    assert raised.value.__notes__ == ["raised by worker 0 during logprobs"]
    assert supervisor.call_all("rollback") == dict.fromkeys(range(3), "rollback")


def test_an_error_of_a_worker_interrupts_idle_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the run would save late, because the worker is busy."""
    pool, told = Scripted(lambda call: ValueError("a bug") if call.method == "decode" else call.method), list[int]()
    pool.ends = lambda call: call.method == "decode"
    monkeypatch.setattr(pool, "interrupt", lambda index, number: told.append(index))
    supervisor = Supervisor(pool, patience=60.0)
    supervisor.call(0, "look_ahead")
    supervisor.call(1, "decode")
    with pytest.raises(ValueError, match="a bug"):
        supervisor.done()
    assert told == [0]
