"""Calls to workers that survive losses. A lost worker is replaced by a new one, which takes the state of another
worker. If there is no room for the new worker, the run continues without it until there is room."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from tlt.cluster.calls import Capacity, Deadlines, PendingCalls
from tlt.cluster.pool import ClusterError, Handle, Pool, WorkerLost
from tlt.rl.parallel import SILENT, Broken, GroupBroken

log = logging.getLogger(__name__)

_PATIENCE = SILENT + 10.0  # timeout in seconds for the other workers of a joint call to return after one was lost
_LOOK = 1.0  # seconds between two checks for workers that exceed their timeout
_JOINT = ("update", "shard_policy")  # joint calls: a worker that hangs in one blocks all others
_PING = 5.0  # timeout in seconds for the answer of a worker that does not hang
_IN_A_ROW = 3  # times that a worker may be lost, without a completed update, before it is left out


class Done(NamedTuple):
    """Worker call that returned, or that ended because the worker was lost."""

    worker: int
    method: str
    result: Any
    lost: bool = False
    """Whether the worker was lost, with all its calls. It is then replaced, or the run continues without it."""


class Supervisor:
    """Workers of a run, the calls that they run, and their replacement after a loss. Calls that change the run's state
    go to all present workers, so any worker can give its state to a new one. If the policy is sharded (`shards`), no
    worker can be replaced, so the first loss ends the run.

    `patience`: timeout of short calls in seconds. A worker that exceeds the timeout of its call counts as lost.
    `grace`: timeout in seconds for the start of a worker's process. A worker that exceeds it is left out. `least`:
    minimum number of present workers.
    """

    def __init__(
        self, pool: Pool, shards: bool = False, patience: float = math.inf, least: int = 1, grace: float = math.inf
    ) -> None:
        self.pool, self.size, self.shards, self.deadlines = pool, pool.size, shards, Deadlines(patience)
        self.capacity = Capacity(pool, pool.size if shards else least, grace)
        self.ready = set(range(pool.size))  # workers that have the run's state
        self.losses = 0
        self.trouble = ""
        """last failure: reason why a worker was lost, or why the process group of the workers broke"""
        self._in_a_row = [0] * pool.size
        self._sources: dict[int, tuple[int, Handle]] = {}  # new worker -> worker whose state it takes, and call `state`
        self.calls = PendingCalls(pool)
        self._kept: list[Done] = []  # calls that returned while another call was waited for
        self._broken = ""  # joint call during which a worker was lost; `call_jointly` has another timeout for it

    @property
    def present(self) -> list[int]:
        """Workers that are not left out, ascending."""
        return self.capacity.present

    def free(self) -> list[int]:
        """Return the workers that have the run's state and no running call."""
        return [index for index in sorted(self.ready) if not self.calls.of_worker(index)]

    def call(self, index: int, method: str, *arguments: Any) -> Handle | None:
        """Start a call of a worker's method. Return its handle; `done` returns its result. If the worker is not
        present, return None without a call. When it rejoins, it gets a copy of the run's state."""
        return self.calls.submit(index, method, *arguments) if index in self.present else None

    def done(self, timeout: float = math.inf) -> list[Done]:
        """Return the calls that have returned: at least one, unless `timeout` seconds pass first. Raises the exception
        of a called method, and ClusterError if the run cannot continue after a loss."""
        return self.take_kept() or self._collect(timeout)

    def take_kept(self) -> list[Done]:
        """Return the calls that returned while the supervisor was waiting for other calls. Each is returned once."""
        kept, self._kept = self._kept, []
        return kept

    def _collect(self, timeout: float = math.inf) -> list[Done]:
        """Return the calls that have returned: at least one, unless `timeout` seconds pass first."""
        until = time.monotonic() + timeout
        while True:
            found = [self._outcome(handle) for handle in self.calls.returned(min(timeout, _LOOK))]
            found += self._hung() + self._awaited_in_vain()
            if found or time.monotonic() >= until:
                return found

    def _hung(self) -> list[Done]:
        """If a call exceeded its timeout, replace the worker that caused this. Return that worker's call as lost."""
        there = [index for index in self.present if index not in self.capacity.awaited]
        firsts = {index: methods[0] for index in there if (methods := self.calls.of_worker(index))}
        watched = {i: method for i, method in firsts.items() if method != self._broken}
        late = {i: method for i, method in watched.items() if self.calls.seconds(i) > self.deadlines.seconds(method)}
        if not late:
            return []
        index, method = self._to_blame(*max(late.items()))
        why = f"no answer for {self.calls.seconds(index):.0f} s"
        for other in range(self.size):  # the others may have been waiting for it
            self.calls.restart_clock(other)
        self.replace(index, method, why)
        return [Done(index, method, None, lost=True)]

    def _awaited_in_vain(self) -> list[Done]:
        """Leave out workers whose process did not start within the timeout. Return their calls as lost."""
        begun, in_vain = self.capacity.poll()
        for index in begun:
            self.calls.restart_clock(index)
        too_few: ClusterError | None = None
        for index in in_vain:  # raise after all are left out, so that no later call waits for one
            try:
                self._leave_out(index, f"worker {index} has not started ({self.pool.capacity()})")
            except ClusterError as error:
                too_few = error
        if too_few:
            raise too_few
        return [Done(index, "take_state", None, lost=True) for index in in_vain]

    def _to_blame(self, index: int, method: str) -> tuple[int, str]:
        """Return the worker that hangs, and the method in which it hangs, because worker `index` exceeded its timeout
        in `method`. In a joint call, this is a worker that does not answer a ping. If worker `index` is new and waits
        for the state of another worker, the other worker hangs. Otherwise worker `index` itself hangs."""
        if method in _JOINT:
            silent = [i for i in self.present if self.pool.updated(i, _PING) is None]
            return max(silent, default=index), method
        if method == "take_state":
            source, state = self._sources[index]
            if source in self.ready and not self.pool.wait([state], 0):
                return source, "state"
        return index, method

    def _outcome(self, handle: Handle) -> Done:
        index, method, seconds = self.calls.pop(handle)
        if method == "state":  # not used by the driver; if this call failed, the waiting `take_state` fails too
            return Done(index, method, None)
        try:
            result = self.pool.result(handle)
        except WorkerLost as lost:
            if method == "take_state":
                self._suspect(*self._sources[index])
            self.replace(index, method, str(lost))
            return Done(index, method, None, lost=True)
        except GroupBroken as error:
            raise _shard_lost("another worker", method, str(error)) from None
        except Exception as error:
            if method != "take_state":
                if not isinstance(error, ValueError):  # the text of a ValueError is complete for the user
                    error.add_note(f"raised by worker {index} during {method}")
                self.calls.break_off()
                self.calls.forget_all_but("take_state")  # the run ends without the results of other calls
                raise
            self.replace(index, method, str(error))  # for example, the new worker's node lacks the model
            return Done(index, method, None, lost=True)
        if method == "take_state":
            self.ready.add(index)
        if isinstance(result, Broken):
            self.trouble = result.reason
            return Done(index, method, result)
        self.deadlines.took(method, seconds)
        if method == "update":  # an update needs the most memory, so a worker that completes one is healthy
            self._in_a_row[index] = 0
        return Done(index, method, result)

    # -- calls that are waited for -------------------------------------------------------------------------------------

    def call_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call a method on all present workers and on replacements of lost ones. Return the results by worker."""
        results: dict[int, Any] = {}
        while missing := [index for index in self.present if index not in results]:
            for index in missing:
                if method not in self.calls.of_worker(index):
                    self.call(index, method, *arguments)
            for done in self._collect():
                if done.method == method and not done.lost:
                    results[done.worker] = done.result
                else:
                    self._kept.append(done)
        return dict(sorted(results.items()))

    def call_one(self, method: str, *arguments: Any) -> Any:
        """Call a method on one worker that has the run's state, if possible a free one. Wait and return its result. If
        the worker is lost, another one is called."""
        while True:
            index = self._source()
            if self.calls.of_worker(index):
                self.calls.break_off()
            self.call(index, method, *arguments)
            while index in self.ready:
                found = self._collect()
                mine = [done for done in found if (done.worker, done.method, done.lost) == (index, method, False)]
                self._kept += [done for done in found if done not in mine]
                if mine:
                    return mine[0].result

    def call_for_policy(self, method: str, *arguments: Any) -> Any:
        """Call a method that needs the whole policy, wait, and return its result. If the policy is sharded, all workers
        are called, and the result is that of worker 0. Otherwise one worker is called."""
        return self.call_all(method, *arguments)[0] if self.shards else self.call_one(method, *arguments)

    def call_jointly(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], meanwhile: Callable[[], None] = lambda: None
    ) -> list[Any] | None:
        """Call a method in which workers exchange data, and wait until all have returned. `arguments` has the arguments
        by worker. Return the results in the order of `arguments`, or None if a worker was lost or the process group
        broke. In that case the other workers return Broken, and a worker that does not return within `_PATIENCE`
        seconds is replaced. `meanwhile` is called repeatedly while waiting."""
        for index, own in arguments.items():
            self.calls.submit(index, method, *own)
        results, until = dict[int, Any](), math.inf
        try:
            while waiting := [i for i in arguments if method in self.calls.of_worker(i)]:
                if time.monotonic() > until:
                    for index in waiting:
                        self.replace(index, method, "it still waits for a lost worker")
                        self._kept.append(Done(index, method, None, lost=True))
                    break
                meanwhile()
                for done in self._collect(0.5):
                    if done.method != method or done.lost:
                        self._kept.append(done)
                    else:
                        results[done.worker] = done.result
                    if done.lost or (done.method == method and isinstance(done.result, Broken)):
                        until = min(until, time.monotonic() + _PATIENCE)
                        self._broken = method
        finally:
            self._broken = ""
        return [results[i] for i in arguments] if until == math.inf else None

    def wait_until_ended(self, methods: Collection[str], patience: float) -> None:
        """Wait until no worker runs these methods. After `patience` seconds, replace the workers that still run one."""
        until = time.monotonic() + patience
        while busy := self.calls.workers_in(methods):
            if time.monotonic() > until:
                for index, method in busy.items():
                    self.replace(index, method, f"it did not end the call within {patience:g} s")
                    self._kept.append(Done(index, method, None, lost=True))
            self._kept += self._collect(0.5)

    def wait_until_ready(self) -> None:
        """Wait until every present worker has the run's state."""
        while len(self.ready) < len(self.present):
            self._kept += self._collect()

    # -- losses --------------------------------------------------------------------------------------------------------

    def replace(self, index: int, method: str, why: str) -> None:
        """Replace worker `index`, which was lost during `method` for the reason `why`. The new worker takes the state
        of another one. A worker that was lost too often is left out for now. Raises ClusterError if no worker has the
        run's state, too few workers are left, or the policy is sharded."""
        why = "; ".join(filter(None, (why, self.pool.last_log_line(index))))
        self.trouble = f"worker {index} was lost during {method} ({why})"
        if self.shards:
            raise _shard_lost(f"worker {index}", method, why)
        log.warning("starting a replacement: %s", self.trouble)
        self.losses += 1
        self._in_a_row[index] += 1
        self._forget(index)
        self._source()  # raises if no worker is ready
        self.pool.replace(index)
        if (times := self._in_a_row[index]) > _IN_A_ROW:
            why = f"worker {index} was lost {times} times in a row; {self.trouble}"
            self._leave_out(index, why, times - _IN_A_ROW)
        else:
            self._bring_up(index)

    def _bring_up(self, index: int) -> None:
        self.capacity.awaits(index)
        source = self._source()
        state = self.call(source, "state")
        assert state is not None, "a ready worker is present"
        self._sources[index] = source, state
        self.call(index, "take_state", state)

    def _leave_out(self, index: int, why: str, times: int = 0) -> None:
        self._forget(index)
        self.losses += 1
        self.capacity.leave_out(index, why, times)

    def _forget(self, index: int) -> None:
        self.ready.discard(index)
        self.calls.forget(index)

    def readmit(self) -> None:
        """Give the run's state to left-out workers that can take part again. Do not call this during an update, because
        the other workers would give them the state before the update."""
        for index in self.capacity.back():
            self._bring_up(index)
            log.warning("worker %d rejoined: %d of %d workers are present", index, len(self.present), self.size)

    def _suspect(self, source: int, state: Handle) -> None:
        """Replace worker `source` if it was lost during its call `state`, for which a new worker waited."""
        if source not in self.ready or not self.pool.wait([state], 0):
            return
        try:
            self.pool.result(state)
        except WorkerLost as lost:
            self._kept.append(Done(source, "state", None, lost=True))
            self.replace(source, "state", str(lost))

    def _source(self) -> int:
        if not self.ready:
            raise ClusterError(f"all workers were lost; {self.trouble}")
        return min(self.ready, key=lambda index: (bool(self.calls.of_worker(index)), index))


def _shard_lost(who: str, method: str, why: str) -> ClusterError:
    return ClusterError(f"{who} was lost during {method} together with its shard of the policy (train.shard): {why}")
