"""What the tuner chooses from: the arms of `Bandit`."""

from __future__ import annotations

from collections.abc import Iterable

from tlt.config.registry import DRAFTERS
from tlt.draft.strategy import PLAIN, Strategy

_AHEAD = (4, 8, 16, 32, 63)  # how long look-ahead chains may be: a wider pass takes longer, by the longest of them


def strategies(drafters: Iterable[str], trees: bool = False) -> list[Strategy]:
    """Plain decoding the first."""
    shapes = {name: DRAFTERS[name].chains + DRAFTERS[name].trees * trees for name in drafters}
    return [PLAIN, *(Strategy(name, *shape) for name, some in shapes.items() for shape in some)]


def with_ahead(arms: Iterable[Strategy]) -> list[Strategy]:
    """Each as it is, and beside look-ahead chains of every length."""
    return [arm._replace(ahead=ahead) for arm in arms for ahead in (0, *_AHEAD)]
