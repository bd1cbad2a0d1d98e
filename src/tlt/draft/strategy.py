"""Strategies of speculation. This module is separate from tree.py, so that the tuner can run without torch."""

from __future__ import annotations

from typing import NamedTuple


class Strategy(NamedTuple):
    """Drafter and sizes of the draft trees of a round. `branching` is the maximum number of children of a node, and of
    nodes that get children at each depth. `verify_tokens` is the maximum number of nodes of a tree. It counts the root,
    so 1 is plain decoding."""

    drafter: str
    """name of the drafter; not used in plain decoding"""
    depth: int
    """maximum depth of a node; the root has depth 0"""
    branching: int
    verify_tokens: int
    min_chance: float = 0.0
    """minimum estimated probability that a node is accepted; less likely nodes are not verified"""
    ahead: int = 0
    """maximum number of look-ahead tokens for a row with a look-ahead draft; 0: the drafter drafts for all rows"""

    @property
    def nodes(self) -> int:
        """Number of nodes of the largest tree, the root included."""
        return max(self.verify_tokens, self.ahead + 1)

    @property
    def name(self) -> str:
        drafted = f"{self.drafter} d{self.depth} b{self.branching} n{self.verify_tokens} p{self.min_chance:g}"
        names = [drafted] * (self.verify_tokens > 1) + [f"ahead {self.ahead}"] * (self.ahead > 0)
        return " + ".join(names) or "plain"


PLAIN = Strategy("plain", 0, 1, 1)
LEARNED = "eagle"
"""name of the learned drafter"""
