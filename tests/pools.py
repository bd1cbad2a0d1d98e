"""Workers in this process. A test chooses their order, and when they are lost."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tlt.cluster.pool import Handle, WorkerLost
from tlt.cluster.remote import ClusterRollout, local_rollout
from tlt.cluster.run_worker import RunWorker
from tlt.cluster.worker import Worker
from tlt.config import Config, parse_config
from tlt.engine.protocol import RolloutEngine
from tlt.environments import Turns
from tlt.rl.parallel import GroupBroken, ProcessGroup, in_order

Build = Callable[[int], Any]
Choose = Callable[[int], int]
"""how many there are -> which of them"""
Loses = Callable[[int, str], str]
"""(worker, method) -> when it dies: `before`, `amid`, `after`, or `` (it does not)"""


class Table:
    """Meeting point of threads that form a group. It sums in the order of ranks. A member that leaves breaks it."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(1)
        self.given: list[Any] = []
        self._lock = threading.Lock()
        self._left = False

    def lay(self, size: int) -> None:
        """Prepare for `size` members, before any of them exchanges."""
        with self._lock:
            if len(self.given) != size:
                self.barrier, self.given = threading.Barrier(size), [None] * size
            if self._left:
                self.barrier.abort()

    def leave(self) -> None:
        with self._lock:
            self._left = True
            self.barrier.abort()

    def __deepcopy__(self, memo: Any) -> Table:
        return self

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.given[rank] = tensor.clone()
        try:
            self.barrier.wait(timeout=60)
            everything = list(self.given)
            self.barrier.wait(timeout=60)
        except threading.BrokenBarrierError:
            raise GroupBroken("another member is gone") from None
        return everything


class Thread:
    """Member of a group. It fails after the number of exchanges in its worker's `dies_at`."""

    def __init__(self, table: Table, rank: int, size: int, worker: ThreadWorker, shards: int = 0) -> None:
        table.lay(size)
        self.table, self.rank, self.size, self.worker = table, rank, size, worker
        self.shards = shards or size

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        if self.worker.dies_at == 0:
            raise Killed
        self.worker.dies_at -= 1
        return self.table.exchange(self.rank, tensor)

    def sum_(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def sum_shards(self, own: Tensor) -> Tensor:
        return in_order(torch.cat(self._exchange(own)))

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._exchange(tensor))

    def leave(self) -> None:
        self.table.leave()


class Killed(BaseException):
    """End of a worker."""


class ThreadWorker(RunWorker):
    """Worker whose group is made of threads."""

    index, dies_at = 0, -1

    @classmethod
    def started(cls, config: Config, index: int, folder: str | Path) -> Self:
        def sit(rendezvous: Any, rank: int, size: int, shards: int, device: torch.device) -> ProcessGroup:
            return Thread(rendezvous, rank, size, worker, shards)

        worker = cls.of_run(config, index, folder, join=sit)
        worker.index = index
        return worker

    def rendezvous(self) -> Any:
        return Table()


def rollout_of(engine: RolloutEngine, turns: Turns | None = None) -> ClusterRollout:
    """Return the rollout of a worker in this process that has this engine."""
    config = parse_config({"model": {"path": "-"}, "data": {"path": "-"}, "reward": {"name": "exact"}})
    config = config.model_copy(update={"engine": engine.config})
    return local_rollout(Worker(config, engine), config, turns)


class StandIn:
    """Functions that all pools of tests share. The test sets how calls are answered."""

    size, is_concurrent = 2, True

    def __init__(self) -> None:
        self.replaced: list[int] = []

    def replace(self, index: int) -> None:
        self.replaced.append(index)

    def has_begun(self, index: int) -> bool:
        return True

    def capacity(self) -> str:
        return "there is room for 1"

    def interrupt(self, index: int, number: float) -> None: ...

    def updated(self, index: int, seconds: float) -> float | None:
        return 0.0

    def last_log_line(self, index: int) -> str:
        return ""

    def put(self, value: Any) -> Any:
        return value

    def close(self) -> None: ...


@dataclass
class Call:
    worker: int
    method: str
    arguments: tuple[Any, ...]
    handle: int
    result: Any = None
    error: BaseException | None = None
    done: bool = False


@dataclass
class TestPool:
    """Pool that copies arguments and results, as between processes."""

    __test__ = False
    is_concurrent = True

    size: int
    build: Build
    choose: Choose = lambda count: 0
    loses: Loses = lambda worker, method: ""
    room: Callable[[], int] = lambda: 99
    """for so many processes at once"""
    calls: dict[int, Call] = field(default_factory=dict)
    log: list[tuple[int, str]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.workers: list[Any] = [None] * self.size
        self.alive = [False] * self.size
        self.waits = [True] * self.size
        self._settle()

    def _settle(self) -> None:
        """Start pending workers, as long as there is room."""
        for index in range(self.size):
            if self.waits[index] and sum(self.alive) < self.room():
                self.workers[index] = self.build(index)
                self.waits[index], self.alive[index] = False, True

    def has_begun(self, index: int) -> bool:
        self._settle()
        return not self.waits[index]

    def capacity(self) -> str:
        return f"there is room for {self.room()}"

    def submit(self, index: int, method: str, *arguments: Any) -> Handle:
        call = Call(index, method, copy.deepcopy(arguments), Handle_(len(self.calls)))
        self.calls[call.handle] = call
        if not self.alive[index] and not self.waits[index]:
            call.done, call.error = True, WorkerLost()
        return call.handle

    def interrupt(self, index: int, number: float) -> None:
        self.workers[index].interrupt(number)

    def updated(self, index: int, seconds: float) -> float | None:
        return getattr(self.workers[index], "updated", 0.0)

    def last_log_line(self, index: int) -> str:
        return ""

    def put(self, value: Any) -> Handle:
        call = Call(-1, "put", (), Handle_(len(self.calls)), copy.deepcopy(value), done=True)
        self.calls[call.handle] = call
        return call.handle

    def wait(self, handles: Collection[Handle], timeout: float | None = None) -> list[Handle]:
        assert handles, "nothing would ever come back"
        self._settle()
        until = time.monotonic() + (60.0 if timeout is None else timeout)
        while not (done := [handle for handle in handles if self.calls[handle].done]):
            if not self._turn():
                if time.monotonic() > until:
                    break
                time.sleep(0.001)
        return done

    def _turn(self) -> bool:
        """Carry out the next calls. Return whether there were any."""
        heads = [next((c for c in self.calls.values() if c.worker == i and not c.done), None) for i in range(self.size)]
        heads = [call for call in heads if call and not self.waits[call.worker]]
        ready = [call for call in heads if all(self.calls[a].done for a in call.arguments if is_handle(a))]
        updates = [call for call in ready if call.method == "update"]
        others = [call for call in ready if call.method != "update"]
        if others:
            self._run(others[self.choose(len(others)) % len(others)])
        else:
            threads = [threading.Thread(target=self._run, args=(call,)) for call in updates]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return bool(ready)

    def _run(self, call: Call) -> None:
        self.log.append((call.worker, call.method))
        when = self.loses(call.worker, call.method)
        try:
            if when == "before":
                raise Killed
            arguments = [self.result(a) if is_handle(a) else a for a in call.arguments]
            worker = self.workers[call.worker]
            worker.dies_at = 1 if when == "amid" else -1
            call.result = copy.deepcopy(getattr(worker, call.method)(*arguments))
            if when:
                raise Killed
        except (Killed, WorkerLost):
            self._die(call.worker, call.method)
        except Exception as error:
            call.error = error
        call.done = True

    def _die(self, index: int, method: str) -> None:
        if method == "update":  # its connections close: those who wait for it notice
            for call in self.calls.values():
                if call.method == "update" and call.worker == index and not call.done:
                    call.arguments[2].leave()
        self.alive[index] = False
        for call in self.calls.values():
            if call.worker == index and not call.done:
                call.done, call.error = True, WorkerLost()

    def result(self, handle: Handle) -> Any:
        call = self.calls[handle]
        assert call.done, "not back yet"
        if call.error:
            raise call.error
        return call.result

    def replace(self, index: int) -> None:
        self._die(index, "")
        self.waits[index] = True
        self._settle()

    def close(self) -> None:
        self.closed = True


class Handle_(int):
    """Number of a type of its own."""


def is_handle(value: Any) -> bool:
    return isinstance(value, Handle_)
