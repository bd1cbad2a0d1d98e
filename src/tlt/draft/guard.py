"""Guards what is done beside the training of a policy: an error there costs speed alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


class Guard(Generic[T]):
    """The only access to an object that may fail. Once a call on the object has raised, the object is dropped, and this
    and every later call returns its default."""

    def __init__(self, inside: T | None, passes_on: tuple[type[Exception], ...] = ()) -> None:
        """`passes_on`: errors that are not the object's own, and are raised on."""
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
        """Call `act` and ignore what it returns."""
        self(act, None)
