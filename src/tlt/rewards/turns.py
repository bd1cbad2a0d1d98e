"""Continuation of responses after a turn of the model. By default the response is finished."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tlt.types import Request, Response, Row


class Turns(Protocol):
    """Continues the responses of a rollout whose turns have ended. The driver of the rollout calls it."""

    step: int
    """number of updates of the policy so far"""
    opens: bool
    """Whether environments write the first tokens of responses. Look-ahead is not possible then."""

    @property
    def awaits(self) -> bool:
        """Whether replies are awaited."""
        ...

    def begin(self, requests: Sequence[Request]) -> list[Row]:
        """Return the rows with which these requests begin."""
        ...

    def take(self, ended: Sequence[Response], seconds: float = 0.0) -> tuple[list[Response], list[Row]]:
        """Take responses whose turn has ended. Return the finished ones, and the rows that continue. If no reply has
        arrived, wait for at most this many seconds."""
        ...

    def keep(self, folder: Path, resume: bool) -> None:
        """Save replies in this folder of a run. If it is resumed, load the replies since its last checkpoint;
        else remove them."""
        ...

    def saved(self, done: int) -> None:
        """Note that a checkpoint of the first `done` steps was saved."""
        ...

    def close(self) -> None:
        """End the processes that were started."""
        ...


class SingleTurn:
    """Turns of responses that consist of a single turn."""

    step, opens, awaits = 0, False, False

    def begin(self, requests: Sequence[Request]) -> list[Row]:
        return [Row(request) for request in requests]

    def take(self, ended: Sequence[Response], seconds: float = 0.0) -> tuple[list[Response], list[Row]]:
        return list(ended), []

    def keep(self, folder: Path, resume: bool) -> None: ...

    def saved(self, done: int) -> None: ...

    def close(self) -> None: ...
