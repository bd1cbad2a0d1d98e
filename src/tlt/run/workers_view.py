"""View of the workers, one line each: their present states, and the active rows over the last seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from tlt.trace import ABSENT, AHEAD, COMPARE, EARLY, IDLE, ROLLOUT, SPOT, UPDATE
from tlt.types import WorkerNow

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {
    ROLLOUT: "green",
    EARLY: "bright_blue",
    AHEAD: "cyan",
    SPOT: "yellow",
    IDLE: "bright_black",
    UPDATE: "blue",
    COMPARE: "red",
    ABSENT: "bright_red",
}
_CELLS = 40
_SECONDS = 0.25  # duration of a cell at first


class _Cell(NamedTuple):
    state: str
    rows: int


class WorkersView:
    """Number of active rows over time, coloured by state. If a rollout does not fit, each cell covers twice the
    time."""

    def __init__(self) -> None:
        self.seconds = _SECONDS
        self._cells: list[list[_Cell]] = []  # by time, then by worker
        self._last = 0.0
        self._phase_began = 0.0

    def phase(self) -> None:
        """Begin another phase of the step."""
        self._phase_began = time.monotonic()

    def record(self, workers: Sequence[WorkerNow]) -> None:
        """Record the present state of each worker, at most once per cell."""
        now = time.monotonic()
        if now - self._last < self.seconds:
            return
        self._last = now
        self._cells = [*self._cells, [_Cell(worker.state, len(worker.live)) for worker in workers]][-_CELLS:]
        if now - self._phase_began > self.seconds * _CELLS:
            self.seconds, self._cells = 2 * self.seconds, self._cells[::2]

    def table(self, workers: Sequence[WorkerNow], step: int, width: int) -> Table:
        """Return the table. `step` is the present step; look-ahead is shown with the numbers of its steps."""
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("worker", justify="right")
        table.add_column("state", width=len(ROLLOUT))
        table.add_column("rows", justify="right", min_width=4)
        table.add_column("longest", justify="right")
        table.add_column(f"active rows over {self._span(width)}", no_wrap=True, width=width)
        table.add_column("steps ahead", no_wrap=True)
        for index, worker in enumerate(workers):
            table.add_row(
                str(index),
                Text(worker.state, COLOURS[worker.state]),
                str(len(worker.live) or ""),
                str(max(worker.live, default="")),
                self._strip(index, width),
                Text(_steps(step, worker.ahead), COLOURS[AHEAD]),
            )
        return table

    def _span(self, width: int) -> str:
        return f"{width * self.seconds:.0f} s"

    def _strip(self, index: int, width: int) -> Text:
        most = dict.fromkeys(COLOURS, 1)  # by state, because look-ahead may have many more rows
        for cell in (cell for cells in self._cells for cell in cells):
            most[cell.state] = max(most[cell.state], cell.rows)
        mine = [cells[index] for cells in self._cells[-width:] if index < len(cells)]
        return Text.assemble(*((_bar(cell.rows, most[cell.state]), COLOURS[cell.state]) for cell in mine))


def _bar(rows: int, most: int) -> str:
    return BARS[-(-rows * (len(BARS) - 1) // most)]


def _steps(step: int, ahead: Sequence[int]) -> str:
    """Return the numbers of the steps, from 1 as on the screen."""
    return ", ".join(str(step + 1 + offset) for offset in ahead)


def stacked(title: str, spent: Mapping[str, float], colours: Mapping[str, str], width: int = 40) -> Text:
    """Return a bar of shares with its legend."""
    total = sum(spent.values()) or 1.0
    bar = [("━" * round(width * seconds / total), colours[name]) for name, seconds in spent.items()]
    legend = [
        (f"  {name.lower()}\N{NO-BREAK SPACE}{seconds / total:.0%}", colours[name])
        for name, seconds in spent.items()
        if seconds / total >= 0.005
    ]
    return Text.assemble(f"{title:<8}", *bar, *legend)
