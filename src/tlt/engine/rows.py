"""The live rows, in one order that everything kept for them follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from tlt.types import Row


class RowStore(Protocol):
    """Something kept for each live row, at the row's place: its keys and values, its noise, its features, its law, a
    drafter's state. The table makes these two calls, and nobody else does."""

    def append(self, row: Row, kept: int) -> None:
        """`row` is live from now on, at the place behind the last one. Of its first `kept` positions, what was kept at
        that place before is still right; with 0 nothing is."""
        ...

    def remove(self, place: int, last: int) -> None:
        """The row at `place` leaves; the row at `last`, the last place, stands there from now on (or was it itself)."""
        ...


class RowTable:
    """Which request stands at which place. It alone decides on the order: a new row comes last, and the last row takes
    the place of one that leaves, so that live rows are places 0 .. B - 1 of every store."""

    def __init__(self, stores: Sequence[RowStore]) -> None:
        self._stores = tuple(stores)
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Row:
        return self._rows[place]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

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
