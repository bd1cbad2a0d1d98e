"""How much faster than plain decoding a rollout is: now and then a round is decoded plainly, to see what that takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.interpolate import interpolate

_EVERY, _FIRST = 200, 2  # rounds of about as many rows: of so many one is plain, the first of them soon
_FADES = 0.8  # what a bucket's plain rounds took before counts so much against the newest one


class Yardstick:
    """Plain decoding gives a token a row and round, so that what it takes for a round's tokens is known as soon as the
    seconds of a plain round of so many rows are. Those are learned in buckets, two for each power of two of the rows,
    and interpolated. One round in 200 costs less than half a percent."""

    def __init__(self, every: int = _EVERY) -> None:
        """One round in so many is plain; 0: none is, but where plain decoding is chosen."""
        self.every = every
        self._rounds: dict[int, int] = {}  # by bucket, those that were drafted
        self._plain: dict[int, tuple[float, float]] = {}  # by bucket: rows, and seconds of a round
        self.measured: dict[str, float] = {}

    def begin(self) -> None:
        """A new rollout; what was learned of plain rounds stays."""
        self.measured = {"seconds": 0.0, "plain_seconds": 0.0, "plain_rounds": 0.0}

    def choose(self, strategy: Strategy, rows: int) -> Strategy:
        """The strategy, or plain decoding where it is time to look at that."""
        if strategy == PLAIN or not self.every:
            return strategy
        bucket = _bucket(rows)
        self._rounds[bucket] = self._rounds.get(bucket, 0) + 1
        return PLAIN if self._rounds[bucket] % self.every == _FIRST else strategy

    def record(
        self, strategy: Strategy, seconds: float, tokens: Sequence[int], ahead: Sequence[bool] = ()
    ) -> dict[str, float]:
        """What a round took, and gave each row; rows of coming steps (`ahead`) take their time and give nothing.
        Returns what was measured in the rollout so far."""
        own = [n for n, is_ahead in zip(tokens, ahead or [False] * len(tokens), strict=True) if not is_ahead]
        rows = len(own)
        if not rows:
            return dict(self.measured)
        if strategy == PLAIN and not any(ahead):
            was = self._plain.get(_bucket(rows), (rows, seconds))
            self._plain[_bucket(rows)] = (_fade(was[0], rows), _fade(was[1], seconds))
            self.measured["plain_rounds"] += 1
        if self._plain:
            plain = interpolate(dict(sorted(self._plain.values())), rows)
            self.measured["seconds"] += seconds
            self.measured["plain_seconds"] += plain * sum(own) / rows
        return dict(self.measured)


def _bucket(rows: int) -> int:
    return math.ceil(2 * math.log2(rows))


def _fade(before: float, now: float) -> float:
    return _FADES * before + (1 - _FADES) * now
