"""Who is decoded now: the waiting line, admission under the cache's bound, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from tlt.engine.kv_cache import KVCache
from tlt.engine.parking import Parking
from tlt.engine.protocol import refuse_impossible
from tlt.engine.rows import RowTable
from tlt.types import Request, Row

_AHEAD_AT_ONCE = 4  # rows of coming steps that a round begins with
_HEADROOM = 32  # tokens that rows must be able to grow by before one more is worth admitting


class Scheduler:
    """`max_positions`: the longest sequence that the target is good for; `verify_tokens`: the largest tree."""

    def __init__(
        self,
        rows: RowTable,
        cache: KVCache,
        parking: Parking,
        max_rows: int,
        verify_tokens: int,
        max_positions: int,
    ) -> None:
        self.rows, self.cache, self.parking = rows, cache, parking
        self.max_rows, self.max_positions = max_rows, max_positions
        self.headroom = max(_HEADROOM, verify_tokens)
        self.waiting: deque[Row] = deque()
        self.ahead: deque[Row] = deque()  # of coming steps: they get slots that nobody waits for

    def submit(self, requests: Iterable[Request], resumed: Iterable[Row] = ()) -> None:
        """Raises ValueError for a request that could never run, before any is queued. Those `resumed` were begun
        elsewhere."""
        rows = [*resumed, *(Row(request) for request in requests)]
        for row in rows:
            self._check(row.request)
        self.waiting.extend(rows)
        self.parking.forget(row.request.seed for row in rows)

    def look_ahead(self, requests: Mapping[int, Request], most: int) -> None:
        """By seed, the most urgent first, in the place of those that were to be decoded ahead. Of as many of these as
        there may be among `most` live rows, those that are live go on. Raises ValueError, as `submit` does."""
        for request in requests.values():
            self._check(request)
        live: set[int] = set()
        urgent = set(islice(requests, max(0, most - sum(not row.ahead for row in self.rows))))
        for place in reversed(range(len(self.rows))):
            if (row := self.rows[place]).ahead and row.request.seed in urgent:
                live.add(row.request.seed)
            elif row.ahead:
                self._leave(place)
        if requests:
            self.parking.keep_only(requests)
        self.ahead = deque(
            self.parking.row(seed) or Row(request, ahead=True) for seed, request in requests.items() if seed not in live
        )

    def put_off_ahead(self) -> None:
        """Those that are decoded ahead leave; they come first when there are free slots again."""
        for place in reversed(range(len(self.rows))):
            if self.rows[place].ahead:
                self.ahead.appendleft(self._leave(place))

    def _leave(self, place: int) -> Row:
        """Before it has ended."""
        if self.rows[place].ahead:
            self.parking.park(place, self.rows[place])
        return self.rows.remove(place)

    def _check(self, request: Request) -> None:
        refuse_impossible(request, self.max_positions, "the model is good for", "lower rollout.max_new_tokens")
        longest = len(request.prompt.token_ids) + request.sampling.max_new_tokens
        if not self.cache.fits(1, longest + self.headroom):
            raise ValueError(
                f"one sequence of {longest} tokens does not fit the key-value cache of {self.cache.bound_tokens} "
                "tokens: raise engine.kv_memory_mb or lower rollout.max_new_tokens"
            )

    def admit(self, most_ahead: int) -> list[Row]:
        """Take from the waiting line what fits, in order, and have the cache hold it together with the live rows, and
        what all may grow by until the next admission is worth a thought.

        An admission costs a prefill and a call for noise whatever it admits, so a full batch waits for an eighth of it
        to be free. Where nobody waits, those of coming steps are taken, as long as there are fewer rows than
        `most_ahead`, and a few in a round, all of which have room: as soon as the worker is wanted for something else,
        a round is too long.
        """
        live = len(self.rows)
        admitted: list[Row] = []
        line = self.waiting or self.ahead
        if not self.waiting:
            most = min(self.max_rows, most_ahead)
            slots = min(most, live + _AHEAD_AT_ONCE)
            if most - live < min(len(line), _AHEAD_AT_ONCE, most // 4):
                return admitted
        elif (slots := self.max_rows) - live < min(len(line), slots // 8):
            return admitted
        longest = self._longest()
        while line and live + len(admitted) < slots:
            with_next = max(longest, line[0].kv_length)
            if not self.cache.fits(live + len(admitted) + 1, with_next + self.headroom):
                break
            longest = with_next
            admitted.append(line.popleft())
        if admitted:
            self.cache.reserve(live + len(admitted), longest + self.headroom)
        return admitted

    def make_room(self, new: int) -> int:
        """Have the cache hold `new` more tokens of every row; where its bound forbids that, the youngest rows leave
        and stand first in the waiting line. Returns how many left."""
        left = 0
        while not self.has_room(new):
            row = self._leave(len(self.rows) - 1)
            (self.ahead if row.ahead else self.waiting).appendleft(row)
            left += 1
        self.cache.reserve(len(self.rows), self._longest() + new)
        return left

    def has_room(self, new: int) -> bool:
        """For `new` more tokens of every row."""
        return self.cache.fits(len(self.rows), self._longest() + new)

    def _longest(self) -> int:
        return max((row.kv_length for row in self.rows), default=0)

    def withdraw(self, seeds: Collection[int]) -> list[Row]:
        """These requests leave, from the waiting line and from among the live rows."""
        left = [row for row in self.waiting if row.request.seed in seeds]
        self.waiting = deque(row for row in self.waiting if row.request.seed not in seeds)
        for place in reversed(range(len(self.rows))):
            if self.rows[place].request.seed in seeds and not self.rows[place].ahead:
                left.append(self.rows.remove(place))
        return left
