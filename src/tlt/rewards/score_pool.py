"""Pool of reward processes with one queue. It scores finished responses while others are being decoded."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

from tlt.rewards.isolated import IsolatedScore
from tlt.rewards.verdicts import DIED, Verdict
from tlt.types import Prompt

_MOST = 64  # maximum number of processes
_CHECK_SECONDS = 0.1  # time between two checks whether the pool needs more processes


class Waiting(NamedTuple):
    """Entry of the pool's queue."""

    prompt: Prompt
    asked: Any
    """`Answer` to be scored, or `Turn` of an episode that needs a reply"""
    verdict: Future[Verdict]
    key: int | None = None
    """Entries with the same key go to the same process. None means any process."""
    alone: bool = False
    """whether the entry needs a call of its own, because a process did not answer a batch that contained it"""
    again: bool = False
    """whether a process has already ended while it worked on this entry"""


class ScorePool:
    """Pool of processes that take work from one queue.

    The pool begins with one process. If working off the queue would take much longer than starting a process, the
    number of processes doubles. `computing` limits the number of processes that use the CPU. Processes that only wait,
    for example for a network, are limited only by the maximum of 64 processes. So reward calls that hang run
    concurrently, and take about one timeout altogether.
    """

    def __init__(self, start: Callable[[], IsolatedScore], computing: int | None) -> None:
        """Start the first process. `start` starts a process and returns it. `computing` is by default half the number
        of CPU cores. Raises RewardError."""
        self._start, self._computing = start, computing or max(1, (os.cpu_count() or 1) // 2)
        self._queue: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._servers: list[_Server] = []
        self._homes: dict[int, _Server] = {}  # key -> its process
        self._starting, self._closed = 0, False
        self._broken: BaseException | None = None
        began = time.monotonic()
        first = start()
        self._start_seconds = time.monotonic() - began
        self._serve(first)

    def submit(self, prompt: Prompt, asked: Any, key: int | None = None) -> Future[Verdict]:
        """Queue a prompt with an `Answer` to score or a `Turn` to reply to (`asked`). Return a future with the verdict.
        Calls with the same `key` go to the same process while it runs."""
        verdict: Future[Verdict] = Future()
        with self._changed:
            self._queue.append(Waiting(prompt, asked, verdict, key))
            self._changed.notify_all()
        self._grow()
        return verdict

    def result(self, verdict: Future[Verdict]) -> Verdict:
        """Wait for a verdict and return it. Raises RewardError if no process is left and none can be started."""
        while not self.ready([verdict], _CHECK_SECONDS):
            pass
        return verdict.result()

    def ready(self, verdicts: Iterable[Future[Verdict]], seconds: float) -> set[Future[Verdict]]:
        """Return those of the `verdicts` that are computed. If none is, wait up to `seconds` for the first one. Raises
        RewardError if no process is left and none can be started."""
        found = wait(verdicts, seconds, FIRST_COMPLETED).done
        if not found:
            self._grow()
            if self._broken:
                raise self._broken
        return found

    def forget_keys(self) -> None:
        """Drop the assignment of keys to processes, because no later call uses a current key."""
        with self._changed:
            self._homes = {}

    def close(self) -> None:
        """End all processes. Those that work on a call are killed. The others run exit handlers of the user first."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for server in list(self._servers):
            if server.works:
                server.scorer.kill()
            else:
                server.thread.join()

    # -- number of processes -------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        with self._changed:
            more = 0 if self._starting or self._closed else self._missing()
            self._starting += more
        for _ in range(more):
            threading.Thread(target=self._begin, daemon=True).start()

    def _missing(self) -> int:
        waiting, count = len(self._queue), len(self._servers)
        spent = sum(server.seconds for server in self._servers)
        each = spent / max(1, sum(server.taken for server in self._servers))
        if waiting * each < 2 * self._start_seconds * count:
            return 0
        computing = sum(server.computes for server in self._servers)
        return max(0, min(count, waiting, _MOST - count, max(count, self._computing) - computing))

    def _begin(self) -> None:
        try:
            scorer = self._start()
        except BaseException as error:
            with self._changed:
                self._starting -= 1
                if not self._servers:
                    self._broken = error
            return
        self._serve(scorer, started=1)

    def _serve(self, scorer: IsolatedScore, started: int = 0) -> None:
        server = _Server(scorer, self._work)
        with self._changed:
            self._starting -= started
            self._servers.append(server)
        server.thread.start()

    # -- one process ---------------------------------------------------------------------------------------------------

    def _work(self, server: _Server) -> None:
        while taken := self._take(server):
            server.begin(len(taken))
            try:
                verdicts = server.scorer.score_all([(one.prompt, one.asked) for one in taken])
            except BaseException as error:  # the process has ended and cannot be started again
                self._lose(server, taken, error)
                return
            server.end()
            if not server.scorer.runs:
                self._free_keys(server)
            self._give(taken, verdicts)
        server.scorer.close()

    def _take(self, server: _Server) -> list[Waiting]:
        """Wait for entries for this process, remove them from the queue and return them. If the pool is closed, return
        an empty list."""
        with self._changed:
            while not (places := self._places(server)) and not self._closed:
                self._changed.wait()
            if self._closed:
                return []
            taken = [self._queue[place] for place in places]
            for place in reversed(places):
                del self._queue[place]
            self._homes |= {one.key: server for one in taken if one.key is not None}
            return taken

    def _places(self, server: _Server) -> list[int]:
        """Return the queue indices of the entries that this process gets in its next call."""
        found: list[int] = []
        for place, one in enumerate(self._queue):
            if len(found) == server.scorer.at_once or (found and (one.alone or self._queue[found[0]].alone)):
                break
            if self._is_for(one, server):
                found.append(place)
        return found

    def _is_for(self, one: Waiting, server: _Server) -> bool:
        return one.key is None or self._homes.get(one.key, server) is server

    def _give(self, taken: Sequence[Waiting], verdicts: Sequence[Verdict]) -> None:
        """Set the verdicts of entries. If a process did not answer a batch, queue each entry again for a call of its
        own, to find the faulty one. If a process ended during a call with one entry, try the entry once more, because
        it may not be the cause."""
        if len(taken) > 1 and not verdicts:
            self._put_back(one._replace(alone=True) for one in reversed(taken))
            return
        for one, verdict in zip(taken, verdicts, strict=True):
            if verdict == DIED and not one.again:
                self._put_back([one._replace(alone=True, again=True)])
            else:
                one.verdict.set_result(verdict)

    def _put_back(self, asked: Iterable[Waiting]) -> None:
        with self._changed:
            self._queue.extendleft(asked)
            self._changed.notify_all()

    def _free_keys(self, server: _Server) -> None:
        """Let any process take entries with the keys of a process that ended, because its environments ended too."""
        with self._changed:
            self._homes = {key: home for key, home in self._homes.items() if home is not server}
            self._changed.notify_all()

    def _lose(self, server: _Server, taken: Sequence[Waiting], error: BaseException) -> None:
        self._free_keys(server)
        with self._changed:
            self._servers.remove(server)
            self._queue.extendleft(reversed(taken))
            self._changed.notify_all()
            if not self._servers and not self._starting:
                self._broken = error


class _Server:
    """Process of the pool, with the number of entries that it took from the queue and its seconds of work. `work` gives
    it entries, in a thread of this process."""

    def __init__(self, scorer: IsolatedScore, work: Callable[[_Server], None]) -> None:
        self.scorer = scorer
        self.thread = threading.Thread(target=work, args=(self,), daemon=True)
        self.taken = 0
        self._spent, self._began = 0.0, 0.0

    def begin(self, count: int) -> None:
        self.taken += count
        self._began = time.monotonic()

    def end(self) -> None:
        self._spent, self._began = self.seconds, 0.0

    @property
    def works(self) -> bool:
        """Whether the process works on a call."""
        return self._began > 0.0

    @property
    def seconds(self) -> float:
        """Seconds that the process has spent on calls, including the current call."""
        return self._spent + (time.monotonic() - self._began if self._began else 0.0)

    @property
    def computes(self) -> bool:
        """Whether the process computes and does not only wait: its CPU time is more than a tenth of the time of its
        calls. The threshold is low, because the process may get only a small share of a busy CPU."""
        return self.scorer.processor_seconds() > 0.1 * self.seconds
