"""What a reward process says of a response, or an environment of a turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LARGEST = 3.4e38  # of float32: with what is beyond, means and deviations overflow


class Verdict(NamedTuple):
    reward: float | None
    outcome: str = ""
    """why there is no reward: timeout, error, not a number, does not apply, crash"""
    detail: str = ""
    """for a person: what was raised or returned"""
    scores: Mapping[str, float] = {}
    """of each term, before its weight; none where there is no reward"""
    reply: str | None = None
    """What an environment replies to a turn; None if the episode is over"""


DIED = Verdict(None, "crash", "its process ended")


def failed(error: Exception) -> Verdict:
    """Return the verdict of an exception that was raised."""
    if isinstance(error, TimeoutError):
        return Verdict(None, "timeout", _text(str, error))
    return Verdict(None, "error", f"{type(error).__name__}: {_text(str, error)}")


def number(value: Any) -> tuple[float, Verdict | None]:
    if isinstance(value, Exception):
        return math.nan, failed(value)
    try:
        score = float(value)
    except Exception:  # of a user's own class it may raise anything
        score = math.nan
    if abs(score) <= LARGEST:
        return score, None
    beyond = ", which float32 cannot hold" if math.isfinite(score) else ""
    return score, Verdict(None, "not a number", f"it gave {_text(repr, value)[:200]}{beyond}")


def _text(form: Callable[[object], str], thing: object) -> str:
    """Of a user's own class that may raise anything too."""
    try:
        return form(thing)
    except Exception:
        return f"a {type(thing).__name__} that cannot be printed"
