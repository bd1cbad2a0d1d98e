"""Design rule 4 for what is done beside the training of a policy: what goes wrong there costs speed alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Guarded:
    """Whose methods marked `guarded` fail once at most: from then on none of them does anything."""

    failed = False
    passes_on: tuple[type[Exception], ...] = ()
    """errors that are not its own, and go through"""


def guarded(otherwise: T) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """A method that returns `otherwise` where it, or another one of the same object, has failed."""

    def mark(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @functools.wraps(method)
        def call(self: Any, *args: P.args, **options: P.kwargs) -> T:
            if self.failed:
                return otherwise
            try:
                return method(self, *args, **options)
            except self.passes_on:
                raise
            except Exception:
                log.exception("the drafter's training failed; going on without")
                self.failed = True
                return otherwise

        return call

    return mark
