"""Strategies of speculation. This module is separate from chains.py, so that the tuner can run without torch."""

from __future__ import annotations

from typing import NamedTuple


class Strategy(NamedTuple):
    """Drafter of a round, and limits on its drafts."""

    drafter: str
    """name of the drafter; not used in plain decoding"""
    depth: int
    """maximum number of draft tokens of a row; 0 is plain decoding"""
    min_chance: float = 0.0
    """minimum estimated probability that a draft token and all draft tokens before it are accepted; less likely draft
    tokens are not verified"""
    ahead: int = 0
    """maximum number of look-ahead tokens for a row with a look-ahead draft; 0: the drafter drafts for all rows"""

    @property
    def new(self) -> int:
        """Maximum number of new tokens of a row in a pass: the root and its draft."""
        return 1 + max(self.depth, self.ahead)

    @property
    def name(self) -> str:
        drafted = f"{self.drafter} d{self.depth} p{self.min_chance:g}"
        names = [drafted] * (self.depth > 0) + [f"ahead {self.ahead}"] * (self.ahead > 0)
        return " + ".join(names) or "plain"


PLAIN = Strategy("plain", 0)
LEARNED = "eagle"
"""name of the learned drafter"""
