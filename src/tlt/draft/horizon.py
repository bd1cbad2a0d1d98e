"""Whether training the drafter pays before the run is over: a pure function of recorded numbers.

A drafter is known by its agreement a, how often a guess is right behind right ones. What it is worth is told by the
tuner's seconds: with chains of d guesses a round commits E_d(a) = 1 + a + ... + a^d tokens and takes T_d, so that
decoding is S(a) = max(F, max over d of E_d(a) T_0 / T_d) times as fast as plain decoding, where F is what it is without
this drafter. What it will be is told by a power law in the seconds x that it was trained for, ln(1 - a) = c - b ln x,
fitted on judgements. The target moves meanwhile, which adds `drift` to ln(1 - a) in every step.

So each plan, to train in the idle time of the next k steps and then to rest, has a price for the steps that remain:
the rollouts' seconds, and what training costs those who decode beside it. The cheapest plan decides. A drafter that is
far behind may catch up first: all workers train it while nothing is decoded, if the price is lower even so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, TypeVar

import numpy as np

Number = TypeVar("Number", float, np.ndarray)

MOST_AGREEMENT = 0.995
_MISSES = np.linspace(0.0, math.log(1 - MOST_AGREEMENT), 129)  # ln(1 - agreement), between which lines are drawn
_MOST_STEPS = 64  # of a plan: a longer run is planned in so many parts


class RoundCosts(NamedTuple):
    """Of the rounds of one size, as the tuner knows them."""

    weight: float
    """seconds that were spent in such rounds"""
    plain: float
    """seconds of one without drafting"""
    drafted: Mapping[int, float]
    """of one with a chain of so many guesses of the learned drafter"""
    fallback: float = 1.0
    """times plain decoding, what the best strategy without that drafter is"""


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

    def trained(self, seconds: float) -> Learning:
        """After so many more."""
        if not seconds:
            return self
        now = self.seconds + seconds
        miss = max(min(self.best, self.miss), self.miss - self.slope * math.log(now / self.seconds))
        return self._replace(miss=miss, seconds=now)

    def next_step(self, trained: float) -> Learning:
        """After so many seconds of training, and one step of the target."""
        after = self.trained(trained)
        moved = min(0.0, after.miss + self.drift)
        back = math.exp(min(0.0, (after.miss - moved) / self.slope)) if self.slope else 1.0
        return after._replace(miss=moved, seconds=max(1e-3, after.seconds * back))


class Horizon(NamedTuple):
    steps: int
    """that remain in the run"""
    rollout_seconds: float
    """of one, as the drafter is now"""
    idle_seconds: float
    """of a step, of all workers together, that training may take"""
    second_costs: float
    """what a second of training takes from those who decode beside it; 1 where it is not idle time"""
    workers: int = 0
    """that may catch up"""


class Decision(NamedTuple):
    trains: bool
    saves: float
    """seconds in the steps that remain, what training costs taken off: of the best plan"""
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
    catch_up: float
    """seconds for which all workers are to train at once, while nothing is decoded"""

    def numbers(self) -> dict[str, float]:
        """For the trace."""
        return {name: float(value) for name, value in self._asdict().items()}

    @property
    def saved_by_a_second(self) -> float:
        return max(0.0, self.saves / self.seconds) if self.seconds else 0.0


def accept_length(agreement: Number, depth: int) -> Number:
    """E_d(a): tokens that a round commits, the target's own one among them."""
    length = 0 * agreement + 1
    for _ in range(depth):
        length = 1 + agreement * length
    return length


def agreement_of(length: float, depth: int) -> float:
    """The agreement at which chains so deep have this accept length."""
    low, high = 0.0, MOST_AGREEMENT
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if accept_length(middle, depth) < length else (low, middle)
    return high


def speed(agreement: Number, costs: RoundCosts) -> Number:
    """S(a): times plain decoding in such rounds."""
    drafted = (accept_length(agreement, d) * costs.plain / t for d, t in costs.drafted.items())
    return reduce(np.maximum, drafted, 0 * agreement + costs.fallback)


def speeds(agreement: Number, costs: Sequence[RoundCosts], depth: int) -> Iterator[tuple[float, Number]]:
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
    seconds = _seconds_of_rollouts(learning, horizon, costs, depth)
    parts = min(horizon.steps, _MOST_STEPS)
    each = horizon.steps / max(1, parts)  # steps of a part
    drifting = learning._replace(drift=learning.drift * each)

    def plan(training: int, catch_up: float = 0.0) -> tuple[float, Learning]:
        """Its price, and where the drafter stands when it ends to train."""
        price, at = catch_up, drifting.trained(catch_up * horizon.workers)
        trained = at
        for part in range(parts):
            idle = each * horizon.idle_seconds if part < training else 0.0
            price += each * seconds(at.miss) + idle * horizon.second_costs
            at = at.next_step(idle)
            trained = at if part < training else trained
        return price, trained

    resting, _ = plan(0)
    plans = {(k, 0.0): plan(k) for k in _lengths(parts)}
    best, _ = min(plans, key=lambda one: plans[one][0])
    plans |= {(k, c): plan(k, c) for k in (best, parts) for c in _catch_ups(horizon, resting)}
    length, catch_up = min(plans, key=lambda one: plans[one][0] + (least * resting if one[1] else 0.0))
    price, trained = plans[length, catch_up]
    seconds_trained = length * each * horizon.idle_seconds + catch_up * horizon.workers
    return Decision(
        trains=seconds_trained > 0 and resting - price > least * resting,
        saves=resting - price,
        seconds=seconds_trained,
        agreement=_agreement(learning),
        speed=mean_speed(speeds(_agreement(learning), costs, depth)),
        speed_trained=mean_speed(speeds(_agreement(trained), costs, depth)),
        steps=horizon.steps,
        second_costs=horizon.second_costs,
        slope=learning.slope,
        drift=learning.drift,
        catch_up=catch_up,
    )


def _seconds_of_rollouts(
    learning: Learning, horizon: Horizon, costs: Sequence[RoundCosts], depth: int
) -> Callable[[float], float]:
    """Of a rollout with a drafter that has this ln(1 - agreement). From a table: a decision asks a thousand times."""
    now = list(speeds(_agreement(learning), costs, depth))
    then = speeds(1 - np.exp(_MISSES), costs, depth)
    share = sum(w * s / t for (w, s), (_, t) in zip(now, then, strict=True)) / sum(weight for weight, _ in now)
    table, step = np.asarray(horizon.rollout_seconds * share).tolist(), float(_MISSES[1])

    def seconds(miss: float) -> float:
        at = min(max(0.0, miss / step), len(table) - 1.001)
        low = int(at)
        return table[low] + (at - low) * (table[low + 1] - table[low])

    return seconds


def _agreement(learning: Learning) -> float:
    return 1 - math.exp(min(0.0, learning.miss))


def _lengths(parts: int) -> Iterator[int]:
    """0, 1, 2, 4, ..., all."""
    length = 0
    while length < parts:
        yield length
        length = max(1, 2 * length)
    yield parts


def _catch_ups(horizon: Horizon, most: float) -> Iterator[float]:
    """Half a rollout, one, 2, 4, ..., as long as that can repay."""
    seconds = horizon.rollout_seconds / 2
    while horizon.workers and 0 < seconds < most:
        yield seconds
        seconds *= 2


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
        self.start = seconds, miss

    @classmethod
    def of(cls, slope: float, start: tuple[float, float], points: Sequence[tuple[float, float]], judged: int) -> Curve:
        curve = cls(*start, slope)
        curve.points, curve.judged = list(points), judged
        return curve

    def as_expected(self) -> Curve:
        """From the same start, before anything was judged."""
        return Curve(*self.start, self.slope)

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

    def now(self) -> float:
        """ln(1 - agreement) by the law, of what is trained."""
        c, b, _ = self.fit()
        return c - b * math.log(self.seconds)

    def position(self, miss: float) -> float:
        """Seconds of training after which a drafter stands there."""
        c, b, _ = self.fit()
        return math.exp(max(-5.0, min(15.0, (c - miss) / max(0.05, b))))
