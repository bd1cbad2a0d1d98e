"""Whether training the drafter pays before the run is over: a pure function of recorded numbers.

A drafter is known by its agreement a, how often a guess is right behind right ones. What it is worth is told by the
tuner's seconds: with chains of d guesses a round commits E_d(a) = 1 + a + ... + a^d tokens and takes T_d, so that it is
S(a) = max(1, max over d of E_d(a) T_0 / T_d) times as fast as plain decoding. What it will be is told by a power law in
the seconds x that it was trained for, ln(1 - a) = c - b ln x, fitted on judgements. The target moves meanwhile, which
adds `drift` to ln(1 - a) in every step.

So each plan, to train in the idle time of the next k steps and then to rest, has a price for the steps that remain:
the rollouts' seconds, and what training costs those who decode beside it. The cheapest plan decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

MOST_AGREEMENT = 0.995
_MOST_STEPS = 64  # of a plan: a longer run is planned in so many parts


class RoundCosts(NamedTuple):
    """Of the rounds of one size, as the tuner knows them."""

    weight: float
    """seconds that were spent in such rounds"""
    plain: float
    """seconds of one without drafting"""
    drafted: Mapping[int, float]
    """of one with a chain of so many guesses of the learned drafter"""


class Learning(NamedTuple):
    """A power law: where the drafter stands on it, and how steep it is."""

    miss: float
    """ln(1 - agreement) now"""
    seconds: float
    """of training after which it would stand here"""
    slope: float
    """b, its pessimistic side"""
    best: float = -math.inf
    """ln(1 - agreement) beyond which nothing is known of the law"""
    drift: float = 0.0
    """that a step adds to `miss`"""

    def next_step(self, trained: float) -> Learning:
        """After so many seconds of training, and one step of the target."""
        seconds, miss = self.seconds + trained, self.miss
        if trained:
            miss = max(min(self.best, miss), miss - self.slope * math.log(seconds / self.seconds))
        moved = min(0.0, miss + self.drift)
        back = math.exp(min(0.0, (miss - moved) / self.slope)) if self.slope else 1.0
        return self._replace(miss=moved, seconds=max(1e-3, seconds * back))


class Horizon(NamedTuple):
    steps: int
    """that remain in the run"""
    rollout_seconds: float
    """of one, as the drafter is now"""
    idle_seconds: float
    """of a step, of all workers together, that training may take"""
    second_costs: float
    """what a second of training takes from those who decode beside it; 1 where it is not idle time"""


class Decision(NamedTuple):
    trains: bool
    saves: float
    """seconds in the steps that remain, what training costs taken off: of the best plan that trains, or below 0"""
    seconds: float
    """of training, that the plan takes"""
    agreement: float
    """as it is now"""
    speed: float
    """times plain decoding, as it is now"""
    speed_trained: float
    """as it would be when the plan has trained"""
    steps: int
    second_costs: float
    slope: float
    drift: float

    def numbers(self) -> dict[str, float]:
        """For the trace."""
        return {name: float(value) for name, value in self._asdict().items()}

    @property
    def saved_by_a_second(self) -> float:
        return max(0.0, self.saves / self.seconds) if self.seconds else 0.0


def accept_length(agreement: float, depth: int) -> float:
    """E_d(a): tokens that a round commits, the target's own one among them."""
    return sum(agreement**k for k in range(depth + 1))


def agreement_of(length: float, depth: int) -> float:
    """The agreement at which chains so deep have this accept length."""
    low, high = 0.0, MOST_AGREEMENT
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if accept_length(middle, depth) < length else (low, middle)
    return high


def speed(agreement: float, costs: RoundCosts) -> float:
    """S(a): times plain decoding in such rounds, which is what the tuner falls back to."""
    return max([1.0, *(accept_length(agreement, d) * costs.plain / t for d, t in costs.drafted.items())])


def speeds(agreement: float, costs: Sequence[RoundCosts], depth: int) -> Iterator[tuple[float, float]]:
    """(weight, S) for each size of rounds. Where no seconds are known, drafting always goes on, at one cost."""
    if not costs:
        yield 1.0, accept_length(agreement, depth)
    for one in costs:
        yield one.weight, speed(agreement, one)


def mean_speed(found: Iterable[tuple[float, float]]) -> float:
    """Of all rounds, by the seconds that they take."""
    pairs = list(found)
    return sum(w for w, _ in pairs) / max(1e-9, sum(w / s for w, s in pairs))


def decide(learning: Learning, horizon: Horizon, costs: Sequence[RoundCosts], depth: int, least: float) -> Decision:
    """`least`: share of the rollouts to come that training must save beyond its costs. `depth`: that drafters are
    judged with."""
    now = list(speeds(_agreement(learning), costs, depth))
    total = sum(weight for weight, _ in now)

    def seconds(at: Learning) -> float:
        """Of a rollout with a drafter that stands there."""
        then = speeds(_agreement(at), costs, depth)
        return horizon.rollout_seconds * sum(w * s / t for (w, s), (_, t) in zip(now, then, strict=True)) / total

    parts = min(horizon.steps, _MOST_STEPS)
    each = horizon.steps / max(1, parts)  # steps of a part
    drifting = learning._replace(drift=learning.drift * each)

    def plan(training: int) -> tuple[float, Learning]:
        """Its price, and where the drafter stands when it ends to train."""
        price, at, trained = 0.0, drifting, drifting
        for part in range(parts):
            idle = each * horizon.idle_seconds if part < training else 0.0
            price += each * seconds(at) + idle * horizon.second_costs
            at = at.next_step(idle)
            trained = at if part < training else trained
        return price, trained

    resting, _ = plan(0)
    plans = {k: plan(k) for k in _lengths(parts)}
    best = min(plans, key=lambda k: plans[k][0], default=0)
    price, trained = plans.get(best, (math.inf, drifting))
    saves = resting - price if plans else 0.0
    return Decision(
        trains=bool(plans) and horizon.idle_seconds > 0 and saves > least * resting,
        saves=saves,
        seconds=best * each * horizon.idle_seconds,
        agreement=_agreement(learning),
        speed=mean_speed(now),
        speed_trained=mean_speed(speeds(_agreement(trained), costs, depth)),
        steps=horizon.steps,
        second_costs=horizon.second_costs,
        slope=learning.slope,
        drift=learning.drift,
    )


def _agreement(learning: Learning) -> float:
    return 1 - math.exp(min(0.0, learning.miss))


def _lengths(parts: int) -> Iterator[int]:
    """1, 2, 4, ..., all."""
    length = 1
    while length < parts:
        yield length
        length *= 2
    if parts:
        yield parts


class Curve:
    """ln(1 - a) = c - b ln x, fitted on the judgements of late, since the law is steeper at first."""

    RECENT, KEPT = 4.0, 64
    """judgements from a quarter of the present seconds on; more than so many are not kept"""
    NOISE = 0.05
    """of one, in ln(1 - a)"""
    DOUBT = 0.15
    """standard deviation of what b may be before anything was judged"""

    def __init__(self, seconds: float, miss: float, slope: float) -> None:
        """It goes through here, with about this b."""
        self.slope, self.points, self.judged = slope, [(seconds, miss)], 0

    @classmethod
    def of(cls, slope: float, points: Sequence[tuple[float, float]], judged: int) -> Curve:
        curve = cls(*points[0], slope)
        curve.points, curve.judged = list(points), judged
        return curve

    @property
    def seconds(self) -> float:
        """That what is trained has been trained for."""
        return self.points[-1][0]

    def add(self, trained: float, miss: float) -> None:
        """So many seconds of training led to there."""
        now, self.judged = self.seconds + trained, self.judged + 1
        lately = [(x, y) for x, y in self.points if x * self.RECENT >= now]
        self.points = [*lately[-self.KEPT :], (now, miss)]

    def fit(self) -> tuple[float, float, float]:
        """c, b, and the standard error of b."""
        logs, misses = [math.log(x) for x, _ in self.points], [miss for _, miss in self.points]
        x, y, weight = sum(logs) / len(logs), sum(misses) / len(misses), (self.NOISE / self.DOUBT) ** 2
        xx = sum((log - x) ** 2 for log in logs)
        xy = sum((log - x) * (miss - y) for log, miss in zip(logs, misses, strict=True))
        b = (weight * self.slope - xy) / (xx + weight)
        c = y + b * x
        squares = sum((miss - c + b * log) ** 2 for log, miss in zip(logs, misses, strict=True))
        noise = max(self.NOISE, math.sqrt(squares / max(1, len(logs) - 2)))
        return c, b, noise / math.sqrt(xx + weight)

    def position(self, miss: float) -> float:
        """Seconds of training after which a drafter stands there."""
        c, b, _ = self.fit()
        return math.exp(max(-5.0, min(15.0, (c - miss) / max(0.05, b))))
