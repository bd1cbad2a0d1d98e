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

MOST = max(8, (os.cpu_count() or 1) // 2)
"""largest number of processes"""
_CHECK_SECONDS = 0.1  # time between two checks whether the pool needs another process


class Waiting(NamedTuple):
    """Entry of the pool's queue."""

    prompt: Prompt
    asked: Any
    """`Answer` to be scored, or `Turn` of an episode that needs a reply"""
    verdict: Future[Verdict]
    since: float
    """time of its submission, by `time.monotonic`"""
    key: int | None = None
    """Entries with the same key go to the same process. None means any process."""
    alone: bool = False
    """whether the entry needs a call of its own, because a process did not answer a batch that contained it"""
    again: bool = False
    """whether a process has already ended while it worked on this entry"""


class ScorePool:
    """Pool of processes that take work from one queue.

    The pool begins with one process. If an entry of the queue waits for longer than it takes to start a process,
    another one starts, up to `MOST`. So reward calls that hang run concurrently.
    """

    def __init__(self, start: Callable[[], IsolatedScore]) -> None:
        """Start the first process. `start` starts a process and returns it. Raises RewardError."""
        self._start = start
        self._queue: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._servers: list[_Server] = []
        self._homes: dict[int, _Server] = {}  # key -> its process
        self._is_starting, self._closed = False, False
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
            self._queue.append(Waiting(prompt, asked, verdict, time.monotonic(), key))
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
        """Start another process if an entry has waited for longer than a start takes."""
        with self._changed:
            waited = time.monotonic() - self._queue[0].since if self._queue else 0.0
            is_full = self._is_starting or self._closed or len(self._servers) >= MOST
            if is_full or waited < self._start_seconds:
                return
            self._is_starting = True
        threading.Thread(target=self._begin, daemon=True).start()

    def _begin(self) -> None:
        try:
            self._serve(self._start())
        except BaseException as error:
            with self._changed:
                self._is_starting = False
                if not self._servers:
                    self._broken = error

    def _serve(self, scorer: IsolatedScore) -> None:
        server = _Server(scorer, self._work)
        with self._changed:
            self._is_starting = False
            self._servers.append(server)
            server.thread.start()  # with the lock, because `close` joins the threads of all servers

    # -- one process ---------------------------------------------------------------------------------------------------

    def _work(self, server: _Server) -> None:
        while taken := self._take(server):
            try:
                verdicts = server.scorer.score_all([(one.prompt, one.asked) for one in taken])
            except BaseException as error:  # the process has ended and cannot be started again
                self._lose(server, taken, error)
                return
            server.works = False
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
            server.works = True  # with the lock, because `close` kills only processes that work on a call
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
            if not self._servers and not self._is_starting:
                self._broken = error


class _Server:
    """Process of the pool. `work` gives it entries, in a thread of this process."""

    def __init__(self, scorer: IsolatedScore, work: Callable[[_Server], None]) -> None:
        self.scorer = scorer
        self.works = False
        """whether the process works on a call"""
        self.thread = threading.Thread(target=work, args=(self,), daemon=True)
