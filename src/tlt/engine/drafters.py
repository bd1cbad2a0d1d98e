"""The engine's drafters behind a wall (design rule 4): one that fails costs speed, never a token."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tlt.draft.drafter import Drafter
from tlt.draft.features import FeatureWindow
from tlt.types import Request

log = logging.getLogger(__name__)
T = TypeVar("T")


_WATCHED = 1000  # drafted tokens that an agreement is taken over


class Agreement:
    """How often a drafter's first guess is right, over its last 1,000; and what that was when it was published: as its
    training measured it, else over its first 1,000 here."""

    def __init__(self, published: float | None) -> None:
        self.published = published
        self.last: deque[bool] = deque(maxlen=_WATCHED)
        self.right = 0

    def add(self, right: bool) -> None:
        self.right += right - (self.last[0] if len(self.last) == _WATCHED else False)
        self.last.append(right)
        if self.published is None and len(self.last) == _WATCHED:
            self.published = self.now

    @property
    def now(self) -> float:
        return self.right / max(1, len(self.last))

    @property
    def alarming(self) -> bool:
        """A drafter that went wrong changes no token, so only this shows it."""
        return self.published is not None and len(self.last) == _WATCHED and self.now < 0.5 * self.published


class Drafters:
    """All of them are told what happens, whichever drafts: any may be asked in any round."""

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        self.usable = {drafter.name: drafter for drafter in drafters}
        self.agreement = {name: Agreement(drafter.agreement) for name, drafter in self.usable.items()}
        self.failures = 0

    def begin(self, window: FeatureWindow | None) -> None:
        self.failures = 0
        self._tell(lambda drafter: drafter.begin(window), "begin")

    def open(self, request: Request, committed: Sequence[int]) -> None:
        self._tell(lambda drafter: drafter.open(request, committed), "open")

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        self._tell(lambda drafter: drafter.commit(row, tokens), "commit")

    def close(self, row: int) -> None:
        self._tell(lambda drafter: drafter.close(row), "close")

    def swap(
        self, drafter: Drafter, window: FeatureWindow | None, live: Iterable[tuple[Request, Sequence[int]]]
    ) -> list[str]:
        """Put a drafter in the place of the one of its name, between two rounds. Returns whose guesses change."""
        changed = [drafter.name]
        for other in self.usable.values():
            if (tell := getattr(other, "swapped", None)) and tell(drafter):  # one that is made of others
                changed.append(other.name)
        self.usable[drafter.name] = drafter
        self.agreement[drafter.name] = Agreement(drafter.agreement)

        def enter() -> None:
            drafter.begin(window)
            for request, committed in live:
                drafter.open(request, committed)

        self.guard(drafter.name, enter, "enter")
        return changed

    def guard(self, name: str, call: Callable[[], T], what: str) -> T | None:
        """The call's result; None if it failed, and then the drafter is gone."""
        try:
            return call()
        except Exception:
            log.exception("the drafter %s failed to %s; going on without it", name, what)
            self.failures += 1
            del self.usable[name]
            return None

    def _tell(self, call: Callable[[Drafter], None], what: str) -> None:
        for name, drafter in list(self.usable.items()):
            self.guard(name, lambda drafter=drafter: call(drafter), what)
