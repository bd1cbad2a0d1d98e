"""Table of the active rows. It defines the order of all per-row state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from tlt.types import Row


class RowStore(Protocol):
    """Store with a state for each active row, at the row's place (its index in the row table). The state is keys and
    values, noise, hidden states, sampling parameters, or a drafter's state. Only the row table calls these two
    methods."""

    def append(self, row: Row, kept: int) -> None:
        """Add `row` at the place after the last one. The state that is already at this place is valid for the row's
        first `kept` positions (0: for none)."""
        ...

    def remove(self, place: int, last: int) -> None:
        """Remove the row at `place`. The row at the last place, `last`, moves to `place`, unless `last` is `place`."""
        ...


class RowTable:
    """Order of the active rows, which only this class changes. A new row comes last. If a row leaves, the last row
    takes its place. So the active rows have places 0 .. B - 1 in every store."""

    def __init__(self, stores: Sequence[RowStore]) -> None:
        self._stores = tuple(stores)
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Row:
        return self._rows[place]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @property
    def own(self) -> list[Row]:
        """Rows of this rollout."""
        return [row for row in self._rows if not row.ahead]

    @property
    def coming(self) -> list[Row]:
        """Look-ahead rows, which are rows of coming steps."""
        return [row for row in self._rows if row.ahead]

    def append(self, row: Row, kept: int = 0) -> None:
        self._rows.append(row)
        for store in self._stores:
            store.append(row, kept)

    def remove(self, place: int) -> Row:
        row, last = self._rows[place], len(self._rows) - 1
        for store in self._stores:
            store.remove(place, last)
        self._rows[place] = self._rows[last]
        self._rows.pop()
        return row

    def remove_all(self, rows: Iterable[Row]) -> list[Row]:
        """Remove these rows and return them, the one in the last place first."""
        gone = set(map(id, rows))
        return [self.remove(place) for place in reversed(range(len(self))) if id(self[place]) in gone]
