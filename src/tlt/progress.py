"""Progress of long work: a bar in a terminal, and a line every 30 seconds elsewhere (a log, Slurm, CI).

Only commands show it (`shown`). Library calls and worker processes print nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported when it is used, so that --help is fast
    from rich.console import Console
    from rich.progress import Progress

_QUIET, _EVERY, _REFRESH = 2.0, 30.0, 0.25  # seconds before the first line, between lines, between updates of a bar
_SECONDS = "s"
_is_shown = False


@contextmanager
def shown(is_shown: bool = True) -> Iterator[None]:
    """Show (default) or hide all progress within the `with` block."""
    global _is_shown
    before, _is_shown = _is_shown, is_shown
    try:
        yield
    finally:
        _is_shown = before


@cache
def console() -> Console:
    """Return the console that shows the bars. Commands print to it while work is in progress."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


@cache
def _bars() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[text]}"))
    return Progress(*columns, console=console(), transient=True)


class Work:
    """Progress of one piece of work: the amount done, the total, the rate and the time left."""

    def __init__(self, name: str, total: float | None, unit: str) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done, self.note = 0.0, ""
        self.left: Callable[[], str] | None = None
        """function that returns text with the time left, if it is known better than from the rate"""
        self._began = time.monotonic()

    def update(self, done: float, note: str = "") -> None:
        self.done, self.note = done, note

    def advance(self, amount: float = 1) -> None:
        self.done += amount

    def __str__(self) -> str:
        """Return text such as `1,200 of 4,000 tokens, 60 tokens/s, 0:00:20 so far, 0:00:47 left`."""
        seconds = time.monotonic() - self._began
        rate = self.done / max(seconds, 1e-9)
        units = self.unit.removesuffix("s") if self.total == 1 and self.unit != _SECONDS else self.unit
        parts = [] if self.total is None else [f"{self.done:,.0f} of {self.total:,.0f} {units}"]
        if self.done and self.unit != _SECONDS:
            parts.append(f"{rate:,.0f} {self.unit}/s" if rate >= 10 else f"{rate:.2g} {self.unit}/s")
        parts.append(f"{_clock(seconds)} so far")
        if self.left:
            parts.append(self.left() or "time left not known yet")
        elif self.done and self.total is not None and self.done < self.total:
            parts.append(f"{_clock((self.total - self.done) / rate)} left")
        return ", ".join([*parts, self.note] if self.note else parts)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def working(name: str, total: float | None = None, unit: str = _SECONDS) -> Iterator[Work]:
    """Show the progress of the work in the `with` block, which may be nested in another one. The block reports its
    progress with `Work.update` or `Work.advance`. Without a `total`, the time left is not shown."""
    work, ended = Work(name, total, unit), threading.Event()
    if not _is_shown:
        yield work
        return
    show = _bar if console().is_terminal else _lines
    thread = threading.Thread(target=show, args=(work, ended.wait), name="progress", daemon=True)
    thread.start()
    try:
        yield work
    finally:
        ended.set()
        thread.join()


def loading() -> AbstractContextManager[Work]:
    """Show that the libraries which the `with` block imports are loading, because this takes some seconds."""
    return working("load torch and transformers")


def _lines(work: Work, wait: Callable[[float], bool]) -> None:
    """Print a line after 2 seconds, every 30 seconds, and at the end. Work shorter than 2 seconds prints nothing.
    `wait(seconds)` returns early, with True, when the work has ended."""
    pause = _QUIET
    while not wait(pause):
        print(f"{work.name}: {work}", file=sys.stderr, flush=True)
        pause = _EVERY
    if pause == _EVERY:
        print(f"{work.name}: {work}, ended", file=sys.stderr, flush=True)


def _bar(work: Work, wait: Callable[[float], bool]) -> None:
    """Show a bar until the work has ended. The first bar starts the display, and the last one stops it."""
    bars = _bars()
    bars.start()
    task = bars.add_task(work.name, total=work.total, text=str(work))
    while not wait(_REFRESH):
        bars.update(task, completed=work.done, text=str(work))
    bars.remove_task(task)
    if not bars.tasks:
        bars.stop()
