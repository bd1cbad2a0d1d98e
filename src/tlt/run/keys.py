"""Keyboard input during the live display of a run."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_PAUSE = 0.2  # seconds between two checks for a pressed key


@contextmanager
def listening(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key` with each pressed key, in another thread, until the `with` block ends. Ctrl-C still interrupts. If
    stdin is not a terminal in the foreground, do nothing."""
    if not _has_keyboard():
        yield
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    over = threading.Event()

    def read_keys() -> None:
        while not over.is_set():
            # reading from the terminal would stop a background process
            if _in_foreground(terminal) and select.select([terminal], [], [], _PAUSE)[0]:
                on_key(os.read(terminal, 1).decode("ascii", "ignore"))
            else:
                over.wait(_PAUSE)

    thread = threading.Thread(target=read_keys, daemon=True)
    tty.setcbreak(terminal)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if _in_foreground(terminal):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _has_keyboard() -> bool:
    with suppress(OSError, ValueError):  # stdin is closed or does not exist
        return sys.stdin.isatty() and _in_foreground(sys.stdin.fileno())
    return False


def _in_foreground(terminal: int) -> bool:
    with suppress(OSError):
        return os.tcgetpgrp(terminal) == os.getpgrp()
    return False
