"""Protocol of tuners, which pick the strategy of each round. `Fixed` always uses the same strategy. `Adaptive` (in
choice.py) uses the fastest one. This module does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tlt.draft.strategy import PLAIN, Strategy


class RoundResult(NamedTuple):
    """Result of a round, from which a tuner learns."""

    strategy: Strategy
    seconds: float
    drafting: float
    """seconds of the draft, part of `seconds`"""
    computed: int
    """number of tokens in the target pass"""
    tokens: Sequence[int]
    """number of committed tokens of each row"""
    scored: bool
    """whether the tuner may learn from the seconds; False, for example, if the round had a prefill"""
    ahead: Sequence[int] = ()
    """number of look-ahead draft tokens of each row; empty if no row had any"""


class Tuner(Protocol):
    @property
    def strategies(self) -> Sequence[Strategy]:
        """Strategies that `choose` picks from. If a drafter has failed, `choose` may also return plain decoding."""
        ...

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        """Return the strategy for a round of `rows` active rows with `context` tokens on average. `usable`: names of
        the drafters that work. `offers`: number of look-ahead tokens that each row could draft."""
        ...

    def record(self, result: RoundResult) -> None:
        """Learn from the result of the round for which `choose` was called last."""
        ...

    def free_rows(self, rows: int) -> int:
        """Return the largest number of rows with which a round takes hardly longer than with `rows` rows."""
        ...

    def brief_rows(self) -> int:
        """Return the largest number of rows with which a round is still short. It limits look-ahead while a worker has
        no other rows, because the worker may soon be needed."""
        ...

    def renew(self, drafter: str, chance: float | None) -> None:
        """Drop what was learned about a drafter, because another one replaced it. `chance`: acceptance rate of the new
        drafter's first draft token; None if not known."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state of the tuner as plain data for a checkpoint."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned in an earlier run. Entries that do not fit this run are ignored."""
        ...


class Fixed:
    """Tuner that uses one strategy for every round."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategies: tuple[Strategy, ...] = (strategy,)

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        strategy = self.strategies[0]
        return strategy if strategy.drafter in usable else PLAIN._replace(ahead=strategy.ahead)

    def record(self, result: RoundResult) -> None: ...

    def free_rows(self, rows: int) -> int:
        return rows

    def brief_rows(self) -> int:
        return sys.maxsize

    def renew(self, drafter: str, chance: float | None) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...
