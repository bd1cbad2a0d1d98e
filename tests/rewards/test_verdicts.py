"""Verdicts of exceptions in users' code."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tlt
from tlt.rewards.verdicts import failed

OURS, THEIRS = str(Path(tlt.__file__).parent), json.__file__


def raised(*files: str, code: str = "1 / 0") -> Exception:
    """Return an error that passed through the first line of each of these files, the innermost last."""
    call: Any = partial(exec, compile(code, files[-1], "exec"), {})
    for file in reversed(files[:-1]):
        call = partial(exec, compile("call()", file, "exec"), {"call": call})
    with pytest.raises((ZeroDivisionError, IndexError)) as caught:
        call()
    return caught.value.with_traceback(caught.tb.tb_next)


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ([f"{OURS}/rewards/score_pool.py", "/me/a.py", "/me/b.py", THEIRS], "/me/b.py:1: "),
        (["/me/a.py", "<string>"], "/me/a.py:1: "),
        ([f"{OURS}_of_mine/a.py"], f"{OURS}_of_mine/a.py:1: "),
        ([f"{OURS}/rewards/score_pool.py", THEIRS], ""),
    ],
)
def test_the_innermost_line_of_the_users_files_is_named(files: list[str], place: str) -> None:
    assert failed(raised(*files)).detail == f"{place}ZeroDivisionError: division by zero"


def test_a_traceback_is_printed_once_for_each_place_and_type(capsys: pytest.CaptureFixture[str]) -> None:
    for code in ("1 / 0", "[][0]", "1 / 0"):
        failed(raised("/me/printed.py", code=code))
    printed = capsys.readouterr().err
    assert [printed.count(name) for name in ("Traceback", "ZeroDivisionError", "IndexError")] == [2, 1, 1]
