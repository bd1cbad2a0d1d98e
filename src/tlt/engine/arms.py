"""What the tuner chooses from: the arms of `Bandit`."""

from __future__ import annotations

from collections.abc import Iterable

from tlt.draft.strategy import PLAIN, Strategy

# depth, branching, tokens to verify, least chance of a node: what each drafter may be used with, from shy to bold.
# A chain ends where the chance that all of it is right falls below what another level costs, in tokens: measured, 0.2
# to 0.4 were alike at batch 1 and 4, and 0.5 was worse.
_SHAPES = {
    "eagle": ((2, 1, 3, 0.3), (4, 1, 5, 0.3), (8, 1, 9, 0.3), (16, 1, 17, 0.3), (6, 2, 12, 0.1)),
    "suffix": ((4, 1, 5, 0.5), (8, 2, 12, 0.3)),
    "mixed": ((4, 2, 8, 0.2), (6, 2, 12, 0.1)),
}
_AHEAD = (4, 8, 16, 32, 63)  # how long look-ahead chains may be: a wider pass takes longer, by the longest of them


def strategies(drafters: Iterable[str]) -> list[Strategy]:
    """Plain decoding the first."""
    return [PLAIN, *(Strategy(name, *shape) for name in drafters for shape in _SHAPES[name])]


def with_ahead(arms: Iterable[Strategy]) -> list[Strategy]:
    """Each as it is, and beside look-ahead chains of every length."""
    return [arm._replace(ahead=ahead) for arm in arms for ahead in (0, *_AHEAD)]
