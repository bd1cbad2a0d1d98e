"""Queues of waiting rows, admission within the cache's limit, and preemption. Rows of coming steps have a lane of their
own: they wait in their own queue, and are active only while no other row waits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from tlt.attention.key_counts import rounded_up
from tlt.engine.kv_cache import KVCache
from tlt.engine.protocol import refuse_impossible
from tlt.engine.rows import RowTable
from tlt.types import Request, Row

_AHEAD_AT_ONCE = 4  # maximum number of look-ahead rows that are admitted in a round
_HEADROOM = 32  # tokens that each row must have room for before another row is admitted


class Scheduler:
    """Queues, admission and preemption of rows. `max_rows` is the largest number of active rows. `max_positions` is the
    longest sequence in tokens that the target supports. `new` is the maximum number of new tokens of a row in a
    round."""

    def __init__(
        self,
        rows: RowTable,
        cache: KVCache,
        max_rows: int,
        prefill_tokens: int,
        new: int,
        max_positions: int,
    ) -> None:
        self.rows, self.cache = rows, cache
        self.max_rows, self.prefill_tokens, self.max_positions = max_rows, prefill_tokens, max_positions
        self.headroom = max(_HEADROOM, new)
        self.waiting: deque[Row] = deque()
        self.coming: deque[Row] = deque()  # look-ahead rows, admitted if no row waits

    def submit(self, requests: Iterable[Request], resumed: Iterable[Row] = ()) -> None:
        """Queue requests, and `resumed`, which are unfinished rows of another engine. Raises ValueError for a request
        that cannot be decoded. In that case nothing is queued."""
        rows = [*resumed, *(Row(request) for request in requests)]
        for row in rows:
            self._check(row.request)
        self.waiting.extend(rows)

    def look_ahead(self, rows: Mapping[int, Row], most: int) -> None:
        """Replace the look-ahead rows by `rows` (seed -> row, the most urgent first). Raises ValueError, like `submit`.

        `most` is the limit of active rows, rows of the rollout included. The first seeds that fit within this limit are
        urgent. An active look-ahead row with an urgent seed continues, and the new row of this seed is not queued."""
        for row in rows.values():
            self._check(row.request)
        urgent = set(islice(rows, max(0, most - len(self.rows.own))))
        self.rows.remove_all(row for row in self.rows.coming if row.request.seed not in urgent)
        live = {row.request.seed for row in self.rows.coming}
        self.coming = deque(row for seed, row in rows.items() if seed not in live)

    def _check(self, request: Request) -> None:
        refuse_impossible(request, self.max_positions, "the model supports", "lower rollout.max_new_tokens")
        longest = len(request.prompt.token_ids) + request.sampling.max_new_tokens
        if not self.cache.fits(1, longest + self.headroom):
            takes = rounded_up(longest + self.headroom, self.cache.store.key_counts)
            raise ValueError(
                f"one sequence of {longest} tokens, with room for {self.headroom} draft tokens, takes {takes} tokens "
                f"of the key-value cache, which has {self.cache.bound_tokens}: raise engine.kv_memory_mb, or lower "
                "engine.max_rows or rollout.max_new_tokens"
            )

    def admit(self, most_ahead: int) -> list[Row]:
        """Take the rows to admit from the queue, in order, and return them. Reserve cache for them and for the active
        rows, with room for `headroom` more tokens of each.

        An admission costs one prefill and one call for noise, for any number of rows. So a full batch waits until an
        eighth of its slots is free. Look-ahead rows are admitted only if no other row waits. At most 4 of them are
        admitted per round (several only if together they have at most `prefill_tokens` / 4 tokens), and only up to
        `most_ahead` active rows in total, because the worker may soon be needed for other work, and a prefill cannot be
        interrupted.
        """
        live = len(self.rows)
        admitted: list[Row] = []
        if not (line := self.waiting or self.coming):
            return admitted
        if not self.waiting:
            most = min(self.max_rows, most_ahead)
            slots = min(most, live + _AHEAD_AT_ONCE)
            if most - live < min(len(line), _AHEAD_AT_ONCE, most // 4):
                return admitted
        elif (slots := self.max_rows) - live < min(len(line), slots // 8):
            return admitted
        longest, room = self._longest(), self.prefill_tokens // _AHEAD_AT_ONCE if line is self.coming else math.inf
        while line and live + len(admitted) < slots and (room >= line[0].kv_length or not admitted):
            room -= line[0].kv_length
            with_next = max(longest, line[0].kv_length)
            if not self.cache.fits(live + len(admitted) + 1, with_next + self.headroom):
                break
            longest = with_next
            admitted.append(line.popleft())
        if admitted:
            self.cache.reserve(live + len(admitted), longest + self.headroom)
        return admitted

    def reserve(self, new: int) -> bool:
        """Reserve cache for `new` more tokens of every active row. Return False if the cache's limit forbids that."""
        fits = self.cache.fits(len(self.rows), tokens := self._longest() + new)
        if fits:
            self.cache.reserve(len(self.rows), tokens)
        return fits

    def make_room(self, new: int) -> int:
        """Reserve cache as `reserve` does. If the cache's limit forbids that, preempt the youngest rows and put them
        first in their queue. Then all active rows must be in one lane. Return the number of preempted rows."""
        before, line = len(self.rows), self.waiting if self.rows.own else self.coming
        while not self.reserve(new):
            line.appendleft(self.rows.remove(len(self.rows) - 1))
        return before - len(self.rows)

    def _longest(self) -> int:
        return max((row.kv_length for row in self.rows), default=0)

    def withdraw(self, seeds: Collection[int]) -> list[Row]:
        """Remove the requests with these seeds from the queue and from the active rows. Return their rows. Look-ahead
        rows are not removed."""
        left = [row for row in self.waiting if row.request.seed in seeds]
        self.waiting = deque(row for row in self.waiting if row.request.seed not in seeds)
        return left + self.rows.remove_all(row for row in self.rows.own if row.request.seed in seeds)
