"""Progress of long work: lines in a log by a clock, a bar in a terminal, and no output in a library call."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from tlt import progress
from tlt.progress import Work, shown, working


class Clock:
    """Clock that advances only while something waits."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def lines(clock: Clock, seconds: float, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of work that takes this many seconds, at 10 tokens per second."""
    work, began = Work("harvest", 1000, "tokens"), clock.now

    def wait(pause: float) -> bool:
        clock.now = min(began + seconds, clock.now + pause)
        work.update(10 * (clock.now - began))
        return clock.now == began + seconds

    progress._lines(work, wait)
    out, err = capsys.readouterr()
    assert out == "", "the output of a command may be read by a program"
    return err.splitlines()


def test_a_log_has_a_line_at_both_ends_and_every_30_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(clock, 75, capsys) == [
        "harvest: 20 of 1,000 tokens, 10 tokens/s, 0:00:02 so far, 0:01:38 left",
        "harvest: 320 of 1,000 tokens, 10 tokens/s, 0:00:32 so far, 0:01:08 left",
        "harvest: 620 of 1,000 tokens, 10 tokens/s, 0:01:02 so far, 0:00:38 left",
        "harvest: 750 of 1,000 tokens, 10 tokens/s, 0:01:15 so far, 0:00:25 left, ended",
    ]
    assert lines(clock, 1.9, capsys) == [], "short work has no line"


def test_the_text_of_a_line(clock: Clock) -> None:
    """An unknown total, seconds as the amount, a slow rate, a note, and work that has not begun."""
    unknown, timed, slow = Work("load", None, "s"), Work("train", 300, "s"), Work("rollout", 8, "responses")
    clock.now += 20
    timed.update(15, "1 - TV 0.61")
    slow.advance()
    slow.advance(2)
    assert str(unknown) == "0:00:20 so far"
    assert str(timed) == "15 of 300 s, 0:00:20 so far, 0:06:20 left, 1 - TV 0.61"
    assert str(slow) == "3 of 8 responses, 0.15 responses/s, 0:00:20 so far, 0:00:33 left"
    assert str(Work("rollout", 1, "responses")) == "0 of 1 response, 0:00:00 so far"
    assert str(Work("rollout", 8, "responses")) == "0 of 8 responses, 0:00:00 so far"


def test_work_that_blocks_has_lines_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile or a load does not report its progress."""
    monkeypatch.setattr(progress, "_QUIET", 0.02)
    monkeypatch.setattr(progress, "_EVERY", 0.02)
    with shown(), working("load"):
        time.sleep(0.3)
    said = capsys.readouterr().err.splitlines()
    assert len(said) >= 3
    assert said[-1].endswith("ended")


def test_a_library_call_prints_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_QUIET", 0.01)
    with shown():
        pass
    with working("load") as work:
        work.advance()
        time.sleep(0.05)
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, force_interactive=True)
    monkeypatch.setattr(progress, "_REFRESH", 0.01)
    monkeypatch.setattr(progress, "console", lambda: console)
    progress._bars.cache_clear()
    yield screen
    progress._bars.cache_clear()


def test_a_terminal_has_bars_for_work_and_part(terminal: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    with shown(), working("bench", 4, "repeats") as whole:
        whole.advance()
        for name in ("load", "profile"):  # the display starts and stops, and starts again
            with working(name):
                time.sleep(0.2)
        time.sleep(0.2)
    assert not progress._bars().live.is_started
    said = terminal.getvalue()
    assert all(word in said for word in ("bench", "1 of 4 repeats", "load", "profile", "so far"))
    assert capsys.readouterr() == ("", "")


def test_work_that_fails_ends_its_display(terminal: io.StringIO) -> None:
    with pytest.raises(ValueError, match="no such model"), shown(), working("load"):
        raise ValueError("no such model")
    assert not progress._bars().live.is_started
