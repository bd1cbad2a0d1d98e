"""What picks the strategy of each round: `Fixed` uses one, `Bandit` (in bandit.py) the fastest. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tlt.draft.strategy import PLAIN, Strategy


class RoundResult(NamedTuple):
    """What a round gave. A value of `tokens` and `ahead` is of a row."""

    strategy: Strategy
    seconds: float
    tokens: Sequence[int]
    """tokens that were committed"""
    scored: bool
    """whether its seconds count; those of a round with a prefill do not"""
    ahead: Sequence[int] = ()
    """tokens that the row's look-ahead had proposed; without any values, no row has one"""


class Tuner(Protocol):
    @property
    def strategies(self) -> Sequence[Strategy]:
        """The strategies that `choose` picks from. Where a drafter has failed, it may return plain decoding, too."""
        ...

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        """The strategy for a round of `rows` live rows with `context` tokens on average. `usable`: names of the
        drafters that still work; `offers`: number of tokens that each row's look-ahead could propose."""
        ...

    def rollout_begins(self) -> None:
        """What rounds cost is asked of the last rollouts: those before count for less from now on."""
        ...

    def record(self, result: RoundResult) -> None:
        """Learn from the round just chosen."""
        ...

    def free_rows(self, rows: int) -> int:
        """How many rows a round may have that takes hardly longer than one of `rows` rows."""
        ...

    def brief_rows(self) -> int:
        """How many rows a round may have that is to be over soon, as the worker may be needed for other work."""
        ...

    def renew(self, drafter: str, chance: float | None) -> None:
        """Another drafter has this name from now on. `chance`: how often its first guess is right, if that is known."""
        ...

    def plain_seconds(self, rows: int, context: float) -> float | None:
        """Return the seconds of a round with plain decoding; None if they are not measured."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """What an earlier run learned; what does not fit this one is left out."""
        ...


class Fixed:
    """One strategy for every round."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategies: tuple[Strategy, ...] = (strategy,)

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        strategy = self.strategies[0]
        return strategy if strategy.drafter in usable else PLAIN._replace(ahead=strategy.ahead)

    def rollout_begins(self) -> None: ...

    def record(self, result: RoundResult) -> None: ...

    def free_rows(self, rows: int) -> int:
        return rows

    def brief_rows(self) -> int:
        return sys.maxsize

    def renew(self, drafter: str, chance: float | None) -> None: ...

    def plain_seconds(self, rows: int, context: float) -> float | None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...
