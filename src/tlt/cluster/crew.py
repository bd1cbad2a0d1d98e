"""Calls to workers that survive losses: a lost worker is replaced by a copy of another. Where there is no place for the
new one, the others go on without it until there is."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from tlt.cluster.capacity import Capacity
from tlt.cluster.deadlines import Deadlines
from tlt.cluster.pool import ClusterError, Handle, Pool, WorkerLost
from tlt.rl.parallel import SILENT, Broken, GroupBroken

log = logging.getLogger(__name__)

_PATIENCE = SILENT + 10.0  # seconds for the others to come back from a joint call that a worker was lost from
_LOOK = 1.0  # seconds between two looks for workers that do not answer
BREAKABLE = (
    "train_drafter",
    "evaluate_drafter",
    "look_ahead",
)  # calls that may be broken off; their last argument is the call's number
_JOINT = ("update", "shard_policy")  # a worker that hangs in one of these holds up all others
_PING = 5.0  # seconds that a worker which does not hang may take to answer
_IN_A_ROW = 3  # times that a worker may be lost with no update in between


class Done(NamedTuple):
    """A call that came back."""

    worker: int
    method: str
    result: Any
    lost: bool = False
    """the worker is gone with all its calls; a new one is started, or the run goes on without it"""


class Crew:
    """Calls that change the run's state go to all present workers, so that any worker can replace another. Where the
    policy is in shards none can: the first loss ends the run."""

    def __init__(
        self, pool: Pool, shards: bool = False, patience: float = math.inf, least: int = 1, grace: float = math.inf
    ) -> None:
        """A worker that does not answer within a call's deadline hangs, and counts as lost. `patience`: deadline of
        short calls, in seconds. `grace`: seconds after which a worker whose process has not begun is left out. `least`:
        number of workers that must be present."""
        self.pool, self.size, self.shards, self.deadlines = pool, pool.size, shards, Deadlines(patience)
        self.capacity = Capacity(pool, pool.size if shards else least, grace)
        self.sound = set(range(pool.size))  # those that hold the run's state
        self.losses = 0
        self.trouble = ""
        """what went wrong last: why a worker was lost, or why the workers' group broke"""
        self._in_a_row = [0] * pool.size
        self._sources: dict[int, tuple[int, Handle]] = {}  # new worker -> worker whose state it takes, and that call
        self._calls: dict[Handle, tuple[int, str]] = {}
        self._since = [0.0] * pool.size  # when each worker began its present call
        self._kept: list[Done] = []  # calls that came back while another call was waited for
        self._number = 0  # number of the last call that may be broken off
        self._broken = ""  # a joint call that a worker was lost from; `together` sets the others' deadline

    @property
    def present(self) -> list[int]:
        """Workers that the run goes on with, in order."""
        return self.capacity.present

    def free(self) -> list[int]:
        """Workers that hold the run's state and have nothing to do."""
        return [index for index in sorted(self.sound) if not self.pending(index)]

    def call(self, index: int, method: str, *arguments: Any) -> Handle | None:
        """Start a call; `done` returns its end. A worker that is left out is not called: it takes the state later."""
        if index not in self.present:
            return None
        if not self.pending(index):
            self._since[index] = time.monotonic()
        handle = self.pool.submit(index, method, *arguments)
        self._calls[handle] = index, method
        return handle

    def call_idle(self, index: int, method: str, *arguments: Any) -> None:
        """Start a call that may be broken off."""
        assert method in BREAKABLE, "its worker would not hear that it is wanted"
        self._number += 1
        self.call(index, method, *arguments, self._number)

    def break_off(self) -> None:
        """Break off all calls that may be: they end amid a micro-batch or with the round, or do not begin."""
        for index in {i for i, method in self._calls.values() if method in BREAKABLE}:
            self.pool.interrupt(index, self._number)

    def pending(self, index: int) -> list[str]:
        """Methods of the worker's calls that have not come back, in order of submission."""
        return [method for i, method in self._calls.values() if i == index]

    def done(self) -> list[Done]:
        """Calls that came back: at least one. Raises what a method raised, and ClusterError if no sound worker is
        left."""
        return self.kept() or self._collect()

    def kept(self) -> list[Done]:
        """Calls that came back while other calls were waited for."""
        kept, self._kept = self._kept, []
        return kept

    def _collect(self, timeout: float = math.inf) -> list[Done]:
        """Calls that came back: at least one, unless the timeout in seconds is over."""
        until = time.monotonic() + timeout
        while True:
            handles = self.pool.wait(list(self._calls), min(timeout, _LOOK))
            found = [self._outcome(handle) for handle in handles if handle in self._calls] + self._hung()
            found += self._awaited_in_vain()
            if found or time.monotonic() >= until:
                return found

    def _hung(self) -> list[Done]:
        """Replace a worker that missed a deadline; it is in the result as lost."""
        now = time.monotonic()
        there = [index for index in self.present if index not in self.capacity.awaited]
        firsts = {index: methods[0] for index in there if (methods := self.pending(index))}
        watched = {i: method for i, method in firsts.items() if method != self._broken}
        late = {i: method for i, method in watched.items() if now - self._since[i] > self.deadlines.seconds(method)}
        if not late:
            return []
        index, method = self._to_blame(*max(late.items()))
        why = f"no answer for {now - self._since[index]:.0f} s"
        self._since = [time.monotonic()] * self.size  # the others may have waited for it
        self.replace(index, method, why)
        return [Done(index, method, None, lost=True)]

    def _awaited_in_vain(self) -> list[Done]:
        """Leave out workers whose process did not begin in time; they are in the result as lost."""
        begun, in_vain = self.capacity.look()
        for index in begun:
            self._since[index] = time.monotonic()
        too_few: ClusterError | None = None
        for index in in_vain:  # all of them, so that calls to those who are left wait for none of these again
            try:
                self._leave_out(index, f"no process of worker {index} has begun ({self.pool.capacity()})")
            except ClusterError as error:
                too_few = error
        if too_few:
            raise too_few
        return [Done(index, "take_state", None, lost=True) for index in in_vain]

    def _to_blame(self, index: int, method: str) -> tuple[int, str]:
        """The worker that hangs, and its method, where this one is late: in a joint call a worker that says nothing at
        all; if this one is new, the worker whose state it is to take; else this one."""
        if method in _JOINT:
            silent = [i for i in self.present if self.pool.updated(i, _PING) is None]
            return max(silent, default=index), method
        if method == "take_state":
            source, state = self._sources[index]
            if source in self.sound and not self.pool.wait([state], 0):
                return source, "state"
        return index, method

    def _outcome(self, handle: Handle) -> Done:
        index, method = self._calls.pop(handle)
        began, self._since[index] = self._since[index], time.monotonic()
        if method == "state":  # the driver has no use for it; if it failed, so does the `take_state` that waits for it
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
                if not isinstance(error, ValueError):  # a ValueError is a sentence for the user as it is
                    error.add_note(f"raised by worker {index} amid {method}")
                self._leave_under_way()
                raise
            self.replace(index, method, str(error))  # the worker could not be built at its place
            return Done(index, method, None, lost=True)
        if method == "take_state":
            self.sound.add(index)
        if isinstance(result, Broken):
            self.trouble = result.reason
            return Done(index, method, result)
        self.deadlines.took(method, self._since[index] - began)
        if method == "update":  # it takes most memory: who gets that far is sound
            self._in_a_row[index] = 0
        return Done(index, method, result)

    def _leave_under_way(self) -> None:
        """Forget the calls under way, as the run ends: what a last save asks of the workers comes after them, and what
        they return or raise is of no use. New workers still take the state."""
        self.break_off()
        self._calls = {handle: call for handle, call in self._calls.items() if call[1] == "take_state"}

    # -- calls that are waited for -------------------------------------------------------------------------------------

    def everyone(self, method: str, *arguments: Any) -> dict[int, Any]:
        """The result of each present worker. If a worker is lost, its replacement is called again."""
        results: dict[int, Any] = {}
        while missing := [index for index in self.present if index not in results]:
            for index in missing:
                if method not in self.pending(index):
                    self.call(index, method, *arguments)
            for done in self._collect():
                if done.method == method and not done.lost:
                    results[done.worker] = done.result
                else:
                    self._kept.append(done)
        return dict(sorted(results.items()))

    def someone(self, method: str, *arguments: Any) -> Any:
        """The result of a sound worker: the first one that has nothing to do, if there is one."""
        while True:
            index = self._source()
            if self.pending(index):
                self.break_off()
            self.call(index, method, *arguments)
            while index in self.sound:
                found = self._collect()
                mine = [done for done in found if (done.worker, done.method, done.lost) == (index, method, False)]
                self._kept += [done for done in found if done not in mine]
                if mine:
                    return mine[0].result

    def whole(self, method: str, *arguments: Any) -> Any:
        """The first worker's result of a call on the whole policy. Where that is in shards, all make the call."""
        return self.everyone(method, *arguments)[0] if self.shards else self.someone(method, *arguments)

    def together(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Any] | None:
        """The results of a call in which these workers need each other; they return Broken if another one is lost. The
        result is None then. All workers are back by then: one that still waits when all connections to a lost worker
        have ended is replaced too. `meanwhile` is called now and then."""
        for index, own in arguments.items():
            self.call(index, method, *own)
        results: dict[int, Any] = {}
        until = math.inf
        while waiting := [i for i in arguments if method in self.pending(i)]:
            if time.monotonic() > until:
                for index in waiting:
                    self.replace(index, method, "it waits for one that was lost")
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
        self._broken = ""
        return [results[i] for i in arguments] if until == math.inf else None

    def call_back(self, methods: Collection[str], patience: float) -> None:
        """Wait until no worker is busy with these methods. One that is not back in `patience` seconds is replaced."""
        until = time.monotonic() + patience
        while busy := {i: method for i, method in self._calls.values() if method in methods}:
            if time.monotonic() > until:
                for index, method in busy.items():
                    self.replace(index, method, f"called back, and not back within {patience:g} s")
                    self._kept.append(Done(index, method, None, lost=True))
            self._kept += self._collect(0.5)

    def all_sound(self) -> None:
        """Wait until every present worker holds the run's state."""
        while len(self.sound) < len(self.present):
            self._kept += self._collect()

    # -- losses --------------------------------------------------------------------------------------------------------

    def replace(self, index: int, amid: str, why: str) -> None:
        """Start a new worker, which takes the state of a sound one. `amid`: the method that the old one was at. A
        worker that was lost too often is left out for now. Raises ClusterError if no worker is sound, or too few are
        left."""
        why = "; ".join(filter(None, (why, self.pool.last_words(index))))
        self.trouble = f"worker {index} was lost amid {amid} ({why})"
        if self.shards:
            raise _shard_lost(f"worker {index}", amid, why)
        log.warning("a new one takes its place: %s", self.trouble)
        self.losses += 1
        self._in_a_row[index] += 1
        self._forget(index)
        self._source()  # raises if no worker is sound
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
        assert state is not None, "a sound worker is present"
        self._sources[index] = source, state
        self.call(index, "take_state", state)

    def _leave_out(self, index: int, why: str, times: int = 0) -> None:
        self._forget(index)
        self.losses += 1
        self.capacity.leave_out(index, why, times)

    def _forget(self, index: int) -> None:
        self.sound.discard(index)
        self._calls = {handle: call for handle, call in self._calls.items() if call[0] != index}

    def take_in(self) -> None:
        """Workers that were left out, and are there again, take the run's state. This must not be called amid an
        update: the others would give the state before it."""
        for index in self.capacity.back():
            self._bring_up(index)
            log.warning("worker %d is there: %d of %d go on", index, len(self.present), self.size)

    def _suspect(self, source: int, state: Handle) -> None:
        """A new worker did not get its state. Replace the worker `source`, whose state it was, if that is gone too."""
        if source not in self.sound or not self.pool.wait([state], 0):
            return
        try:
            self.pool.result(state)
        except WorkerLost as lost:
            self._kept.append(Done(source, "state", None, lost=True))
            self.replace(source, "state", str(lost))

    def _source(self) -> int:
        if not self.sound:
            raise ClusterError(f"all workers were lost; {self.trouble}")
        return min(self.sound, key=lambda index: (bool(self.pending(index)), index))


def _shard_lost(who: str, amid: str, why: str) -> ClusterError:
    return ClusterError(f"{who} was lost amid {amid}, and its shard of the policy with it (train.shard): {why}")
