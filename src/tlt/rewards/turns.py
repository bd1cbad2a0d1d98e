"""Continuation of responses after a turn of the model. Without an environment, one turn is the response."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tlt.types import Request, Response, Row


class Turns(Protocol):
    """Interface of objects that continue responses after a turn of the model. The driver of the rollout calls them."""

    step: int
    """index of the current step, which is the number of updates of the policy so far"""
    opens: bool
    """whether an environment wrote the first tokens of a response; look-ahead is then not possible"""

    @property
    def awaits(self) -> bool:
        """Whether any response waits for a reply of its environment."""
        ...

    def begin(self, requests: Sequence[Request]) -> list[Row]:
        """Return a row for each request of a new rollout. A row contains the environment's first text, if there is
        one."""
        ...

    def take(self, ended: Sequence[Response], seconds: float = 0.0) -> tuple[list[Response], list[Row]]:
        """Pass responses whose turn has ended to their environments. Return the finished responses, and the rows of
        responses that continue because a reply has arrived. If none has arrived, wait up to `seconds` for one."""
        ...

    def keep(self, folder: Path, resume: bool) -> None:
        """Record the replies of environments in the folder of the run. If the run is resumed, load the replies since
        its last checkpoint. Otherwise delete recorded replies."""
        ...

    def saved(self, done: int) -> None:
        """Drop recorded replies of the first `done` steps, because a checkpoint of these steps was saved."""
        ...

    def close(self) -> None:
        """End the processes of the environments."""
        ...


class SingleTurn:
    """Turns without an environment: each response is finished after a single turn of the model."""

    step, opens, awaits = 0, False, False

    def begin(self, requests: Sequence[Request]) -> list[Row]:
        return [Row(request) for request in requests]

    def take(self, ended: Sequence[Response], seconds: float = 0.0) -> tuple[list[Response], list[Row]]:
        return list(ended), []

    def keep(self, folder: Path, resume: bool) -> None: ...

    def saved(self, done: int) -> None: ...

    def close(self) -> None: ...
