"""Verdicts: results of a reward process for a response, or of an environment for a turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LARGEST = 3.4e38  # largest float32; means and standard deviations of larger rewards overflow


class Verdict(NamedTuple):
    reward: float | None
    outcome: str = ""
    """reason why there is no reward: timeout, error, not a number, does not apply, crash"""
    detail: str = ""
    """exception or value for the log"""
    scores: Mapping[str, float] = {}
    """score of each term before its weight; empty without a reward"""
    reply: str | None = None
    """reply of an environment to a turn; None if the episode is over"""


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
    except Exception:  # a user's class may raise any exception
        score = math.nan
    if abs(score) <= LARGEST:
        return score, None
    beyond = ", which float32 cannot hold" if math.isfinite(score) else ""
    return score, Verdict(None, "not a number", f"it returned {_text(repr, value)[:200]}{beyond}")


def _text(form: Callable[[object], str], thing: object) -> str:
    """Return str or repr of an object. A user's class may raise any exception here."""
    try:
        return form(thing)
    except Exception:
        return f"a {type(thing).__name__} that cannot be printed"
