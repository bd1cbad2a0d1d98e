"""Design rule 4 for what is done beside the training of a policy: what goes wrong there costs speed alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


class Guard(Generic[T]):
    """The only way to something that may fail, and no harm done: once it has raised, it is let go, and whatever is
    asked of it has the answer that it would have if it were not there."""

    def __init__(self, inside: T | None, passes_on: tuple[type[Exception], ...] = ()) -> None:
        """`passes_on`: errors that are not its own, and go through."""
        self.inside, self.passes_on = inside, passes_on

    def __call__(self, act: Callable[[T], R], otherwise: R) -> R:
        if self.inside is None:
            return otherwise
        try:
            return act(self.inside)
        except self.passes_on:
            raise
        except Exception:
            log.exception("the drafter's training failed; going on without")
            self.inside = None
            return otherwise

    def tell(self, act: Callable[[T], object]) -> None:
        """Whatever it returns."""
        self(act, None)
