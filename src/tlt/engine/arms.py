"""The strategies that the tuner chooses from: the arms of `Bandit`."""

from __future__ import annotations

from collections.abc import Iterable

from tlt.config.registry import DRAFTERS
from tlt.draft.strategy import PLAIN, Strategy

_AHEAD = (4, 8, 16, 32, 63)  # limits of look-ahead chains in tokens; the longest chain sets the width of the pass


def strategies(drafters: Iterable[str], trees: bool = False) -> list[Strategy]:
    """Return plain decoding and the strategies of these drafters."""
    shapes = {name: DRAFTERS[name].chains + DRAFTERS[name].trees * trees for name in drafters}
    return [PLAIN, *(Strategy(name, *shape) for name, some in shapes.items() for shape in some)]


def with_ahead(arms: Iterable[Strategy]) -> list[Strategy]:
    """Return each arm alone, and combined with look-ahead chains of each limit."""
    return [arm._replace(ahead=ahead) for arm in arms for ahead in (0, *_AHEAD)]
