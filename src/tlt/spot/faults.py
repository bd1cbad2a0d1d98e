"""Fault barrier: an error in drafter training is logged and makes the run slower, but does not end it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

log = logging.getLogger(__name__)
Owner = TypeVar("Owner", bound="FaultBarrier")
P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")


class FaultBarrier:
    """Base class of objects that are switched off after one of their `contained` methods has raised."""

    is_on = True
    passes_on: tuple[type[Exception], ...] = ()
    """exceptions that `contained` methods raise as usual, because they concern the run itself"""

    def switch_off(self) -> None:
        self.is_on = False


def contained(default: D) -> Callable[[Callable[Concatenate[Owner, P], R]], Callable[Concatenate[Owner, P], R | D]]:
    """Decorate a method of a `FaultBarrier`. If the method raises, the error is logged and the barrier is switched off.
    From then on the method does nothing and returns `default`."""

    def decorate(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R | D]:
        @wraps(method)
        def called(self: Owner, *arguments: P.args, **named: P.kwargs) -> R | D:
            if not self.is_on:
                return default
            try:
                return method(self, *arguments, **named)
            except self.passes_on:
                raise
            except Exception:
                log.exception("drafter training failed; the run continues without it")
                self.switch_off()
                return default

        return called

    return decorate
