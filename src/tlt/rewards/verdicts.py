"""Verdicts: the result of scoring a response, or of a call to an environment for its reply to a turn."""

from __future__ import annotations

import math
import os
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tlt.data.continuation import ReplyContent

_LIBRARIES = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
_printed = set[tuple[str, type]]()  # (place in the code, type) of the errors whose traceback was printed
LARGEST = 3.4e38  # largest float32; means and standard deviations of larger rewards overflow


class Verdict(NamedTuple):
    reward: float | None
    """reward of the response or of the turn; None if there is none"""
    outcome: str = ""
    """reason why there is no reward: timeout, error, not a number, does not apply, crash"""
    detail: str = ""
    """explanation of the outcome for the log, such as the text of an exception"""
    scores: Mapping[str, float] = {}
    """score of each reward term before its weight, or the environment's `scores`; empty if there is no reward"""
    reply: ReplyContent | None = None
    """reply of an environment to a turn, a text or messages; None if the episode is over or there is no environment"""


DIED = Verdict(None, "crash", "its process ended")


def failed(error: BaseException) -> Verdict:
    """Return the verdict for an exception that user code raised. Print the traceback, once for each place and type."""
    if isinstance(error, TimeoutError):
        return Verdict(None, "timeout", _text(str, error))
    place = _place_of(error)
    if (place, type(error)) not in _printed:
        _printed.add((place, type(error)))
        traceback.print_exception(error)
    return Verdict(None, "error", f"{place}{type(error).__name__}: {_text(str, error)}")


def _place_of(error: BaseException) -> str:
    """Return the innermost line of the traceback that is in a file of the user, such as `/home/me/rewards.py:12: `, or
    an empty text if there is none."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if os.path.isabs(file) and not any(file.startswith(folder + os.sep) for folder in _LIBRARIES):
            found = f"{file}:{line}: "
    return found


def number(value: Any) -> tuple[float, Verdict | None]:
    if isinstance(value, BaseException):
        return math.nan, failed(value)
    try:
        score = float(value)
    except Exception:  # float() of an object of the user may raise any exception
        score = math.nan
    if abs(score) <= LARGEST:
        return score, None
    beyond = ", which float32 cannot hold" if math.isfinite(score) else ""
    return score, Verdict(None, "not a number", f"it returned {_text(repr, value)[:200]}{beyond}")


def _text(form: Callable[[object], str], thing: object) -> str:
    """Return `form(thing)`, where `form` is str or repr. If this raises an exception, which a class of the user may do,
    return a text with the name of the class."""
    try:
        return form(thing)
    except Exception:
        return f"a {type(thing).__name__} that cannot be printed"
