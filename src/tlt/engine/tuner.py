"""Which strategy a round uses: `Fixed`, or `Bandit`, which measures and picks the fastest, plain decoding among them.

The bandit is BEG-MAB of the TLT paper (arXiv 2511.16665, section 5: bucketed epsilon-greedy over the window of what
each arm gave) with a model that fills in what was not tried. The time of a round is a matter of the bucket (live rows
and context) and the tokens it commits a matter of the text, so both are kept apart: an arm's tokens are learned
wherever it is used, its seconds start from a profile taken at start-up, scaled by what the bucket's other arms took.
No torch here: `bench/tuner_regret.py` runs it against recorded tables.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tlt.draft.strategy import PLAIN, Strategy

_WINDOW = 64  # rounds remembered of an arm in a bucket
_EPSILON = 0.05
_DOUBT = 0.15  # relative doubt about an arm after one round of it; falls with the root of their number
_PRIOR_ROUNDS = 4  # what the model says counts as much as this many rounds
_UNKNOWN = 0.4  # how often a drafter that nobody knows is thought to be right
_MARGIN = 0.02  # an arm gives way only to one that is better by this


# depth, branching, tokens to verify, least chance of a node: what each drafter may be used with, from shy to bold
_SHAPES = {
    "eagle": ((2, 1, 3, 0.3), (4, 1, 5, 0.2), (4, 2, 8, 0.15), (6, 1, 7, 0.1), (6, 2, 12, 0.1)),
    "suffix": ((4, 1, 5, 0.5), (8, 2, 12, 0.3)),
    "mixed": ((4, 2, 8, 0.2), (6, 2, 12, 0.1)),
}


def strategies(drafters: Iterable[str]) -> list[Strategy]:
    """The arms of `Bandit`, plain decoding the first."""
    return [PLAIN, *(Strategy(name, *shape) for name in drafters for shape in _SHAPES[name])]


class Tuner(Protocol):
    @property
    def strategies(self) -> Sequence[Strategy]:
        """All that `choose` may ever return."""
        ...

    def choose(self, rows: int, context: float, usable: Collection[str]) -> Strategy:
        """For a round of `rows` live rows of `context` tokens in the mean; `usable` names the drafters that still
        work."""
        ...

    def record(self, strategy: Strategy, seconds: float, tokens: int, scored: bool) -> None:
        """What the round just chosen took and gave; rounds with a prefill are not scored."""
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

    def choose(self, rows: int, context: float, usable: Collection[str]) -> Strategy:
        return self.strategies[0] if self.strategies[0].drafter in usable else PLAIN

    def record(self, strategy: Strategy, seconds: float, tokens: int, scored: bool) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...


class Bucket(NamedTuple):
    """Powers of two of live rows, of four of context."""

    rows: int
    context: int


def bucket_of(rows: int, context: float) -> Bucket:
    return Bucket(max(0, math.ceil(math.log2(rows))), max(0, math.ceil(math.log(max(1.0, context) / 256, 4))))


@dataclass
class _Seen:
    """The last rounds of an arm."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    accepted: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """tokens a row"""

    def add(self, seconds: float, accepted: float) -> None:
        self.seconds.append(seconds)
        self.accepted.append(accepted)


class Bandit:
    """`profile[rows][strategy]`: seconds of a round, measured at start-up; rows in between are interpolated.
    `chances[drafter]`: how often a guess is right, as far as that is known before."""

    def __init__(
        self,
        strategies: Iterable[Strategy],
        profile: Mapping[int, Mapping[Strategy, float]],
        chances: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.chances = chances or {}
        self.strategies = tuple(strategies)
        self.profile = {rows: dict(profile[rows]) for rows in sorted(profile)}
        self.rng = random.Random(seed)
        self.seen: dict[Bucket, dict[Strategy, _Seen]] = {}
        self.accepted: dict[Strategy, _Seen] = {}  # over all buckets
        self.current = PLAIN
        self.switched = False
        self.catch_up: dict[str, float] = {}  # seconds that a drafter's first round after another one took longer
        self.stay = 20.0  # rounds that an arm stays, in the mean
        self._rounds_on = 0
        self._now = (Bucket(0, 0), 1)

    # -- the choice ----------------------------------------------------------------------------------------------------

    def choose(self, rows: int, context: float, usable: Collection[str]) -> Strategy:
        bucket = bucket_of(rows, context)
        self._now = (bucket, rows)
        arms = [arm for arm in self.strategies if arm == PLAIN or arm.drafter in usable]
        speed = {arm: self.tokens(arm, bucket) / self.seconds(arm, bucket, rows) for arm in arms}
        best = max(arms, key=lambda arm: speed[arm])
        if self.current in speed and best != self.current:
            stay = self.stay * self.seconds(best, bucket, rows)
            margin = _MARGIN + self.catch_up.get(best.drafter, 0.0) / stay
            if speed[best] < speed[self.current] * (1 + margin):
                best = self.current
        # an arm is worth a try only if what is not known of it could make it the best
        hopeful = [a for a in arms if a != best and speed[a] * (1 + self._doubt(a, bucket)) > speed[best]]
        picked = self.rng.choice(hopeful) if hopeful and self.rng.random() < _EPSILON else best
        self._turn_to(picked)
        return picked

    def _turn_to(self, arm: Strategy) -> None:
        self.switched = arm.drafter != self.current.drafter
        self._rounds_on += 1
        if arm != self.current:
            self.stay += 0.1 * (self._rounds_on - self.stay)
            self._rounds_on = 0
        self.current = arm

    def _doubt(self, arm: Strategy, bucket: Bucket) -> float:
        here = self.seen.get(bucket, {}).get(arm)
        return _DOUBT / math.sqrt(1 + (len(here.seconds) if here else 0))

    # -- what is known -------------------------------------------------------------------------------------------------

    def tokens(self, arm: Strategy, bucket: Bucket) -> float:
        """Tokens a row commits in a round."""
        if arm == PLAIN:
            return 1.0
        here = self.seen.get(bucket, {}).get(arm)
        return _blend(list(here.accepted) if here else [], self._tokens_anywhere(arm))

    def _tokens_anywhere(self, arm: Strategy) -> float:
        seen = self.accepted.get(arm)
        return _blend(list(seen.accepted) if seen else [], self._guess(arm))

    def _guess(self, arm: Strategy) -> float:
        """From the drafter's other arms: the chance that one more level is reached, read off their tokens."""
        chances = [
            _chance(statistics.fmean(seen.accepted), other.depth)
            for other, seen in self.accepted.items()
            if other.drafter == arm.drafter and seen.accepted
        ]
        return _tokens_of(statistics.fmean(chances) if chances else self.chances.get(arm.drafter, _UNKNOWN), arm.depth)

    def seconds(self, arm: Strategy, bucket: Bucket, rows: int) -> float:
        """Of a round in this bucket."""
        here = self.seen.get(bucket, {})
        scales = [
            statistics.median(seen.seconds) / self._profiled(other, 2**bucket.rows)
            for other, seen in here.items()
            if seen.seconds
        ]
        prior = self._profiled(arm, 2**bucket.rows) * (statistics.median(scales) if scales else 1.0)
        own = list(here[arm].seconds) if arm in here else []
        return (
            (len(own) * statistics.median(own) + _PRIOR_ROUNDS * prior) / (len(own) + _PRIOR_ROUNDS) if own else prior
        )

    def _profiled(self, arm: Strategy, rows: int) -> float:
        below = max((r for r in self.profile if r <= rows), default=min(self.profile))
        above = min((r for r in self.profile if r >= rows), default=max(self.profile))
        low, high = self.profile[below][arm], self.profile[above][arm]
        return low if above == below else low + (high - low) * (rows - below) / (above - below)

    # -- what a round taught -------------------------------------------------------------------------------------------

    def record(self, strategy: Strategy, seconds: float, tokens: int, scored: bool) -> None:
        bucket, rows = self._now
        if not scored or strategy not in self.strategies:
            return
        if self.switched and strategy != PLAIN:  # its drafter had to catch up: charged to the switch, not to the arm
            excess = max(0.0, seconds - self.seconds(strategy, bucket, rows))
            known = self.catch_up.get(strategy.drafter, excess)
            self.catch_up[strategy.drafter] = known + 0.2 * (excess - known)
            self.accepted.setdefault(strategy, _Seen()).accepted.append(tokens / rows)
            return
        self.seen.setdefault(bucket, {}).setdefault(strategy, _Seen()).add(seconds, tokens / rows)
        self.accepted.setdefault(strategy, _Seen()).accepted.append(tokens / rows)

    # -- the checkpoint's part -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "accepted": [[list(arm), list(seen.accepted)] for arm, seen in self.accepted.items()],
            "seen": [
                [list(bucket), list(arm), list(seen.seconds), list(seen.accepted)]
                for bucket, arms in self.seen.items()
                for arm, seen in arms.items()
            ],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        for arm, accepted in state.get("accepted", ()):
            if (key := Strategy(*arm)) in self.strategies:
                self.accepted.setdefault(key, _Seen()).accepted.extend(accepted)
        for bucket, arm, seconds, accepted in state.get("seen", ()):
            if (key := Strategy(*arm)) in self.strategies:
                seen = self.seen.setdefault(Bucket(*bucket), {}).setdefault(key, _Seen())
                seen.seconds.extend(seconds)
                seen.accepted.extend(accepted)


def _blend(own: Sequence[float], prior: float) -> float:
    """The mean of what was seen, with the prior as a few rounds more."""
    return (sum(own) + _PRIOR_ROUNDS * prior) / (len(own) + _PRIOR_ROUNDS)


def _tokens_of(chance: float, depth: int) -> float:
    return sum(chance**k for k in range(depth + 1))


def _chance(tokens: float, depth: int) -> float:
    """The inverse of `_tokens_of`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if _tokens_of(middle, depth) < tokens else (low, middle)
    return (low + high) / 2
