"""Whether training the drafter pays before the run is over: a pure function of recorded numbers.

A drafter is described by its agreement a: the chance that a guess is right if those before it are. Its worth follows
from the tuner's seconds: with chains of d guesses a round commits E_d(a) = 1 + a + ... + a^d tokens and takes T_d, so
decoding is S(a) = max(F, max over d of E_d(a) T_0 / T_d) times as fast as plain decoding, where F is the speed without
this drafter. Training follows a power law in its seconds x: ln(1 - a) = c - b ln x.

A plan is to train in the idle time of the next k steps and then to rest. Its price for the steps that remain is the
rollouts' seconds and what training costs the workers that decode beside it. The cheapest plan decides. A drafter that
is far behind may catch up first: all workers train it while nothing is decoded, if that makes the price lower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

Number = TypeVar("Number", float, np.ndarray)

MOST_AGREEMENT = 0.995
_MISSES = np.linspace(0.0, math.log(1 - MOST_AGREEMENT), 129)  # ln(1 - agreement): points of an interpolation
_LEAST_SPEEDUP = 1.1  # a rollout tells of a drafter where it is so many times as fast as without one
_MOST_STEPS = 64  # steps of a plan; a longer run is planned in so many parts of several steps


class RoundCosts(NamedTuple):
    """Costs of the rounds of one size, as the tuner knows them."""

    weight: float
    """seconds that were spent in such rounds"""
    plain: float
    """seconds of a round without drafting"""
    drafted: Mapping[int, float]
    """seconds of a round, by the number of guesses in the learned drafter's chains"""
    fallback: float = 1.0
    """speed of the best strategy without the learned drafter, in multiples of plain decoding"""


class Learning(NamedTuple):
    """A power law: where the drafter stands on it, and how steep it is."""

    miss: float
    """ln(1 - agreement) now"""
    seconds: float
    """seconds of training after which it would stand here"""
    slope: float
    """b"""

    def trained(self, seconds: float) -> Learning:
        """After so many more seconds of training."""
        return self._replace(miss=float(self.misses(seconds)), seconds=self.seconds + seconds)

    def misses(self, seconds: float | np.ndarray) -> np.ndarray:
        """ln(1 - agreement) after so many more seconds of training."""
        return np.asarray(self.miss - self.slope * np.log1p(np.asarray(seconds) / self.seconds))


class Horizon(NamedTuple):
    steps: int
    """steps that remain in the run"""
    rollout_seconds: float
    """seconds of a step's rollouts with the present drafter"""
    idle_seconds: float
    """seconds of a step, summed over workers, that training may take"""
    second_costs: float
    """seconds of decoding beside it that a second of training costs; 1 where training takes no idle time"""
    workers: int = 0
    """number of workers that may catch up"""
    entries: int = 0
    """tokens of its responses, which are nearly all of its harvest"""
    speed: float = 0.0
    """of its rounds, in multiples of plain decoding; 0: not known"""
    version: int | None = None
    """of the target that decoded it; rollouts by the same one are of one step. None: this one is a step"""

    def followed_by(self, other: Horizon) -> Horizon:
        """Both rollouts are of one step."""
        return other._replace(
            rollout_seconds=self.rollout_seconds + other.rollout_seconds,
            idle_seconds=self.idle_seconds + other.idle_seconds,
            entries=self.entries + other.entries,
        )


class Decision(NamedTuple):
    trains: bool
    saves: float
    """seconds that the best plan saves in the steps that remain, less what its training costs"""
    seconds: float
    """seconds of training in the plan"""
    agreement: float
    """present agreement"""
    slope: float
    """b of the law of learning"""
    speed: float
    """present speed, in multiples of plain decoding"""
    speed_trained: float
    """speed at the end of the plan's training"""
    steps: int
    second_costs: float
    catch_up: float
    """seconds for which all workers are to train at once, while nothing is decoded"""
    perfect: float
    """seconds that a perfect drafter would save in the steps that remain"""
    reachable: float
    """seconds that a drafter of the level which can most likely be reached would save"""
    stake: float = math.inf
    """seconds that training may cost until it has led further, as the gate says"""
    staked: float = 0.0
    """seconds that it has cost since it last did"""

    def numbers(self) -> dict[str, float]:
        """All fields, for the trace."""
        return {name: float(value) for name, value in self._asdict().items()}

    @property
    def saved_by_a_second(self) -> float:
        return max(0.0, self.saves / self.seconds) if self.seconds else 0.0


def accept_length(agreement: Number, depth: int) -> Number:
    """E_d(a): tokens that a round with chains of d = `depth` guesses commits, the bonus token counted."""
    length = 0 * agreement + 1
    for _ in range(depth):
        length = 1 + agreement * length
    return length


def agreement_of(length: float, depth: int) -> float:
    """The agreement at which chains of `depth` guesses have this accept length, found by bisection."""
    low, high = 0.0, MOST_AGREEMENT
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if accept_length(middle, depth) < length else (low, middle)
    return high


def speeds(agreement: float | np.ndarray, costs: Sequence[RoundCosts], depth: int) -> np.ndarray:
    """S(a) in rounds of each size [C, ...], in multiples of plain decoding. Where no costs are known, it is the accept
    length [1, ...]."""
    agreement = np.asarray(agreement, dtype=float)
    if not costs:
        return np.asarray(accept_length(agreement, depth))[None]
    found = np.multiply.outer([one.fallback for one in costs], np.ones_like(agreement))
    for d in {d for one in costs for d in one.drafted}:
        rounds = [one.plain / one.drafted.get(d, math.inf) for one in costs]
        found = np.maximum(found, np.multiply.outer(rounds, accept_length(agreement, d)))
    return found


def weights(costs: Sequence[RoundCosts]) -> np.ndarray:
    """The fraction of all rounds' seconds that each size of rounds took [C]."""
    found = np.array([one.weight for one in costs] or [1.0])
    return found / max(1e-9, found.sum())


def mean_speed(found: np.ndarray, plain: np.ndarray) -> float:
    """The speed over rounds of all sizes: these have speeds `found` [C], and take `plain` [C] seconds plainly."""
    return float(plain.sum() / (plain / found).sum())


def miss_at(measured: float, costs: Sequence[RoundCosts], depth: int) -> float | None:
    """ln(1 - agreement) at which decoding is `measured` times as fast as plain decoding, over all sizes of rounds.
    Rounds of `weight` seconds at speed S take weight * S seconds plainly. None if decoding is hardly faster than
    without the drafter, or could not be so fast, as that tells nothing of the drafter."""
    table = weights(costs) @ speeds(1 - np.exp(_MISSES), costs, depth)
    if not _LEAST_SPEEDUP * table[0] <= min(measured, table[-1]):
        return None
    return float(np.interp(measured, table, _MISSES))


def decide(
    learning: Learning, horizon: Horizon, costs: Sequence[RoundCosts], depth: int, least: float, reachable: float = 0.0
) -> Decision:
    """Choose the cheapest plan. `least`: fraction of the rollouts to come that training must save beyond its costs.
    `depth`: guesses of the chains that drafters are judged with. `reachable`: ln(1 - agreement) that can most
    likely be reached."""
    seconds = _seconds_of_rollouts(learning, horizon, costs, depth)
    parts = min(horizon.steps, _MOST_STEPS)
    each = horizon.steps / max(1, parts)  # steps of a part
    before = np.arange(parts)  # parts before each

    def plan(training: int, catch_up: float = 0.0) -> tuple[float, Learning]:
        """The plan's price in seconds, and where the drafter stands at the end of its training."""
        begun, idle = learning.trained(catch_up * horizon.workers), each * horizon.idle_seconds
        rollouts = seconds(begun.misses(idle * np.minimum(before, training)))
        price = catch_up + each * float(rollouts.sum()) + training * idle * horizon.second_costs
        return price, begun.trained(training * idle)

    resting, _ = plan(0)
    plans = {(k, 0.0): plan(k) for k in _lengths(parts)}
    best, _ = min(plans, key=lambda one: plans[one][0])
    plans |= {(k, c): plan(k, c) for k in (best, parts) for c in _catch_ups(horizon, resting)}
    length, catch_up = min(plans, key=lambda one: plans[one][0] + (least * resting if one[1] else 0.0))
    price, trained = plans[length, catch_up]
    now = speeds(_agreement(learning), costs, depth)
    seconds_trained = length * each * horizon.idle_seconds + catch_up * horizon.workers
    return Decision(
        trains=seconds_trained > 0 and resting - price > least * resting,
        saves=resting - price,
        seconds=seconds_trained,
        agreement=_agreement(learning),
        slope=learning.slope,
        speed=mean_speed(now, weights(costs) * now),
        speed_trained=mean_speed(speeds(_agreement(trained), costs, depth), weights(costs) * now),
        steps=horizon.steps,
        second_costs=horizon.second_costs,
        catch_up=catch_up,
        perfect=resting - horizon.steps * float(seconds(_MISSES[-1])),
        reachable=max(0.0, resting - horizon.steps * float(seconds(reachable))),
    )


def _seconds_of_rollouts(
    learning: Learning, horizon: Horizon, costs: Sequence[RoundCosts], depth: int
) -> Callable[[np.ndarray | float], np.ndarray]:
    """ln(1 - agreement) -> seconds of a rollout with such a drafter, interpolated in a table."""
    now, then = speeds(_agreement(learning), costs, depth), speeds(1 - np.exp(_MISSES), costs, depth)
    table = horizon.rollout_seconds * ((weights(costs) * now) @ (1 / then))
    return lambda misses: np.asarray(np.interp(-np.asarray(misses), -_MISSES, table))


def _agreement(learning: Learning) -> float:
    return 1 - math.exp(min(0.0, learning.miss))


def _lengths(parts: int) -> Iterator[int]:
    """Numbers of parts to train in: 0, 1, 2, 4, ..., all."""
    length = 0
    while length < parts:
        yield length
        length = max(1, 2 * length)
    yield parts


def _catch_ups(horizon: Horizon, most: float) -> Iterator[float]:
    """Seconds to catch up for: half a rollout, one, 2, 4, ..., as long as they can repay."""
    seconds = horizon.rollout_seconds / 2
    while horizon.workers and 0 < seconds < most:
        yield seconds
        seconds *= 2
