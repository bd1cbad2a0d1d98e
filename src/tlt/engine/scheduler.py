"""Queues of waiting rows, admission within the cache's limit, placement in free slots, and preemption. Rows of coming
steps have a lane of their own: they wait in their own queue, and are active only while no other row waits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tlt.attention.key_counts import rounded_up
from tlt.engine.kv_cache import KVCache
from tlt.engine.protocol import refuse_impossible
from tlt.engine.rows import RowTable
from tlt.types import Request, Row

if TYPE_CHECKING:
    from tlt.engine.state import RolloutState

_AHEAD_AT_ONCE = 4  # maximum number of look-ahead rows that are admitted in a round
_HEADROOM = 32  # tokens that each row must have room for before another row is admitted


class Scheduler:
    """Queues, admission and preemption of rows. `max_rows` is the largest number of active rows. `max_positions` is the
    longest sequence in tokens that the target supports. `new` is the maximum number of new tokens of a row in a
    round."""

    def __init__(
        self, rows: RowTable, cache: KVCache, max_rows: int, prefill_tokens: int, new: int, max_positions: int
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


# -- placement ---------------------------------------------------------------------------------------------------------


class Placing(NamedTuple):
    """New rows, grouped by how they get their keys and values, in the order in which they take the free places."""

    kept: list[Row]
    """rows whose place still has the keys and values of their prompt, from an earlier row with the same prompt"""
    fresh: list[Row]
    """rows that need a prefill"""
    copies: list[Row]
    """Rows that copy the keys and values of their prompt from another row with the same prompt, instead of a prefill.
    The other row is active, or in `kept` or `fresh`."""


def place_and_prefill(admitted: Sequence[Row], rollout: RolloutState, cache: KVCache) -> int:
    """Place the admitted rows. Prefill each prompt once, then copy its keys and values to the other rows of the group.
    Return the number of prefilled tokens."""
    rows, window = rollout.rows, rollout.runner.window
    kept, fresh, copies = place_new_rows(admitted, rows, cache)
    for row in kept:
        rows.append(row, kept=row.kv_length)
    known = {id(row): rollout.turns.known(row) for row in fresh}
    computed = 0
    for some in ([row for row in fresh if known[id(row)]], [row for row in fresh if not known[id(row)]]):
        computed += _prefill(some, known, rollout, cache)
    first = len(rows)
    for row in copies:
        rows.append(row)
    origin = {row.request.prompt.token_ids: place for place, row in reversed(list(enumerate(rows)))}
    for place, row in enumerate(copies, start=first):
        source = origin[row.request.prompt.token_ids]
        row.finite &= rows[source].finite
        cache.copy(source, place, row.kv_length)
        if window:
            window.copy(source, place, row.kv_length)
    return computed


def _prefill(fresh: Sequence[Row], known: Mapping[int, int], rollout: RolloutState, cache: KVCache) -> int:
    """Place rows and prefill them. The keys and values of a row's first `known[id(row)]` tokens are restored from its
    last turn instead. Return the number of prefilled tokens."""
    first = len(rollout.rows)
    for place, row in enumerate(fresh, start=first):
        rollout.rows.append(row)
        if known[id(row)]:
            rollout.turns.restore(place, row)
    finite = rollout.runner.prefill(first, [row.context for row in fresh], [known[id(row)] for row in fresh])
    for place, (row, good) in enumerate(zip(fresh, finite, strict=True), start=first):
        if not good:
            row.finite = False
            cache.wipe(place, row.kv_length)  # a prefill pads shorter rows, and the padding may not be finite
    return sum(row.kv_length - known[id(row)] for row in fresh)


def place_new_rows(new: Sequence[Row], live: Iterable[Row], cache: KVCache) -> Placing:
    """Group the new rows by how they get their keys and values: see `Placing`. `live`: the active rows."""
    live, rest = list(live), list(new)
    kept: list[Row] = []
    while (at := _holder(rest, cache.held(len(live) + len(kept)))) is not None:
        kept.append(rest.pop(at))
    known = {row.request.prompt.token_ids for row in (*live, *kept)}
    fresh: list[Row] = []
    copies: list[Row] = []
    for row in rest:
        prompt = row.request.prompt.token_ids
        (copies if prompt in known and not row.tokens else fresh).append(row)
        known.add(prompt)
    return Placing(kept, fresh, copies)


def _holder(rows: Sequence[Row], held: tuple[int, ...]) -> int | None:
    """Return the index of the first row whose context is exactly the prompt `held`; None if there is none."""
    return next((i for i, row in enumerate(rows) if not row.tokens and row.request.prompt.token_ids == held), None)
