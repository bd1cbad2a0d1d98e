"""Placement of new rows in free slots of the cache, with their keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tlt.engine.kv_cache import KVCache
from tlt.engine.state import RolloutState
from tlt.types import Row


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
    rows, window = rollout.rows, rollout.window
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
