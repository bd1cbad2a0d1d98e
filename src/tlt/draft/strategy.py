"""How to speculate in a round. (Separate from tree.py, so that the tuner can be run without torch.)"""

from __future__ import annotations

from typing import NamedTuple


class Strategy(NamedTuple):
    """`verify_tokens` counts the root, so 1 is plain decoding."""

    drafter: str
    """name of the drafter; without meaning in plain decoding"""
    depth: int
    branching: int
    verify_tokens: int
    min_chance: float = 0.0
    """a node less likely to be reached than this is not verified"""
    ahead: int = 0
    """a row that has a look-ahead is drafted by up to so many tokens of it, not by the drafter; 0: by the drafter"""

    @property
    def nodes(self) -> int:
        """Number of nodes of the largest tree."""
        return max(self.verify_tokens, self.ahead + 1)

    @property
    def name(self) -> str:
        drafted = f"{self.drafter} d{self.depth} b{self.branching} n{self.verify_tokens} p{self.min_chance:g}"
        names = [drafted] * (self.verify_tokens > 1) + [f"ahead {self.ahead}"] * (self.ahead > 0)
        return " + ".join(names) or "plain"


PLAIN = Strategy("plain", 0, 1, 1)
LEARNED = "eagle"
"""name of the drafter that is trained"""
