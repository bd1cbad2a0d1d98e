"""Panels of the live display: a line per worker with its state and its number of active rows (requests being decoded)
over the last seconds, and bars of shares."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from tlt.trace import AHEAD, FACTS, ROLLOUT
from tlt.types import WorkerNow

BARS = "▁▂▃▄▅▆▇█"
_CELLS = 40
_SECONDS = 0.25  # duration that a cell of a bar shows at first


class _Cell(NamedTuple):
    state: str
    rows: int


class WorkersView:
    """Bar for each worker that shows its number of active rows over time, coloured by state. A bar has up to 40 cells,
    and a cell covers 0.25 s at first. If a phase takes longer than all cells cover, each cell covers twice the time
    from then on."""

    def __init__(self) -> None:
        self.seconds = _SECONDS
        self._cells: list[list[_Cell]] = []  # indexed by time, then by worker
        self._last = 0.0
        self._phase_began = 0.0

    def phase(self) -> None:
        """Note that a new phase of the step begins, such as the rollout or the update."""
        self._phase_began = time.monotonic()

    def record(self, workers: Sequence[WorkerNow]) -> None:
        """Record the present state and number of active rows of each worker, at most once in the duration of a cell."""
        now = time.monotonic()
        if now - self._last < self.seconds:
            return
        self._last = now
        self._cells = [*self._cells, [_Cell(worker.state, len(worker.live)) for worker in workers]][-_CELLS:]
        if now - self._phase_began > self.seconds * _CELLS:
            self.seconds, self._cells = 2 * self.seconds, self._cells[::2]

    def table(self, workers: Sequence[WorkerNow], step: int, width: int) -> Table:
        """Return the table of the workers. `width` is the width of the bars in characters. `step` is the current step.
        The last column shows for which future steps a worker decodes look-ahead drafts."""
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("worker", justify="right")
        table.add_column("state", width=len(ROLLOUT))
        table.add_column("rows", justify="right", min_width=4)
        table.add_column("longest", justify="right")
        table.add_column(f"active rows over {width * self.seconds:.0f} s", no_wrap=True, width=width)
        table.add_column("steps ahead", no_wrap=True)
        for index, worker in enumerate(workers):
            table.add_row(
                str(index),
                Text(worker.state, FACTS[worker.state].colour),
                str(len(worker.live) or ""),
                str(max(worker.live, default="")),
                self._strip(index, width),
                Text(_steps(step, worker.ahead), FACTS[AHEAD].colour),
            )
        return table

    def _strip(self, index: int, width: int) -> Text:
        most = dict.fromkeys(FACTS, 1)  # by state, because look-ahead may have many more rows than the rollout
        for cell in (cell for cells in self._cells for cell in cells):
            most[cell.state] = max(most[cell.state], cell.rows)
        mine = [cells[index] for cells in self._cells[-width:] if index < len(cells)]
        return Text.assemble(*((_bar(cell.rows, most[cell.state]), FACTS[cell.state].colour) for cell in mine))


def _bar(rows: int, most: int) -> str:
    return BARS[-(-rows * (len(BARS) - 1) // most)]


def _steps(step: int, ahead: Sequence[int]) -> str:
    """Return the numbers of future steps as text, counted from 1. `ahead` has their distances to `step`."""
    return ", ".join(str(step + 1 + offset) for offset in ahead)


def stacked(title: str, spent: Mapping[str, float], colours: Mapping[str, str], width: int = 40) -> Text:
    """Return a bar that shows the shares of several durations, with a legend in percent. `spent` is in seconds."""
    total = sum(spent.values()) or 1.0
    bar = [("━" * round(width * seconds / total), colours[name]) for name, seconds in spent.items()]
    legend = [
        (f"  {name.lower()}\N{NO-BREAK SPACE}{seconds / total:.0%}", colours[name])
        for name, seconds in spent.items()
        if seconds / total >= 0.005
    ]
    return Text.assemble(f"{title:<8}", *bar, *legend)
