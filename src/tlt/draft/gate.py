"""Whether training the drafter pays: what was measured of it in this run, and `horizon.decide` on that.

The drafter in use is looked at on harvest that is new, step after step. Each judged stretch of training says how far
that much training led. Each rollout says what it took, how long workers were idle in it, and what its rounds cost. A
drafter that was trained before, and is of use, starts at rest: what it could gain from the target it was made for it
has, until it is seen to fall.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tlt.draft.horizon import (
    Curve,
    Decision,
    Horizon,
    Learning,
    RoundCosts,
    accept_length,
    agreement_of,
    decide,
    mean_speed,
    speeds,
)


@dataclass(frozen=True)
class Thresholds:
    """All that the drafter's life is decided by. What is not measured in the run itself is here."""

    stretch: int = 16
    """micro-batches, of all workers, that are judged together: judging takes as long as two to four"""
    judged: int = 2
    """micro-batches of harvest that a candidate is judged by"""
    better: float = 1.02
    """times the accept length of the drafter in use, what a candidate must have to go live: a judgement errs by about
    that, and a swap costs a pass over the windows of all live rows"""
    looks: float = 0.02
    """of the workers' time in rollouts, what looks at a drafter at rest may take"""
    least_saving: float = 0.01
    """of the rollouts to come, what training must save beyond its costs"""
    sure: float = 1.0
    """standard errors by which measurements are read against training"""
    sure_of_drift: float = 2.0
    """and those by which a drift at rest must differ from none, or one look from those before it"""
    lately: int = 4
    """looks, and rollouts, that the present is a mean of"""
    level: int = 8
    """looks that the drift at rest, and the level of a drafter that was trained before, are taken over"""
    fallen: float = 0.2
    """in ln(1 - agreement): a fall below the curve of training by which the target is seen to have moved away"""
    slope: float = 0.75
    """b of the curve of training before anything was judged: 0.73 was measured over 420 micro-batches behind a change
    of the task, at two new prompts a step"""
    cold: int = 40
    """micro-batches that a random drafter's training counts as more, so that the curve begins at no agreement"""
    pace: float = 0.075
    """seconds of a micro-batch, until the first was trained on"""
    trial: int = 400
    """micro-batches after the start, or after such a fall, for which it is thought to learn as `slope` says: the first
    judgements tell of weights, and of harvest, that are mostly of before"""
    unjudged: int = 4
    """stretches without a judgement, after which nobody catches up"""
    measured: int = 8
    """judgements after which the curve of one that was trained before is known beyond its first level"""
    second_costs: float = 0.12
    """seconds that a second of training takes from those who decode beside it, until it was measured in the run; 0.08
    to 0.17 were, elsewhere"""
    unknown_steps: int = 50
    """that a run is taken to go on for whose end is not known"""
    useful: float = 0.4
    """agreement of a drafter that is of use, as long as no seconds of rounds are known"""


THRESHOLDS = Thresholds()
_NUMBERS = ("level", "starting", "published", "moved", "resting_since", "rollouts", "pace", "used", "tried")
"""of a gate, in its checkpoint"""


class SpotReport(NamedTuple):
    """What a call to train did."""

    micro_batches: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Judgement(NamedTuple):
    """A candidate and the drafter in use on the same harvest."""

    entries: int = 0
    in_use: float = 0.0
    """rounds in which the drafter in use would decode these, with chains of `unroll` guesses"""
    candidate: float = 0.0
    """likewise the candidate, if there is one"""
    first: float = 0.0
    """those of the candidate's rounds whose first guess is right"""
    broken_off: bool = False
    """these are the parts that were done by then"""
    seconds: float = 0.0
    """that it took the workers"""

    @property
    def is_better(self) -> bool:
        """Whether the candidate is to go live: never one that is NaN, or was not judged."""
        return self.in_use > THRESHOLDS.better * self.candidate > 0.0


def summed(judgements: Iterable[Judgement]) -> Judgement:
    """Of several parts, or workers."""
    entries, in_use, candidate, first, broken_off, seconds = list(zip(*judgements, strict=True)) or [()] * 6
    return Judgement(sum(entries), sum(in_use), sum(candidate), sum(first), any(broken_off), sum(seconds))


class TrainingGate:
    """Accept lengths are of chains of `unroll` guesses, by judgements: entries a round."""

    def __init__(self, unroll: int, trained: bool = False, thresholds: Thresholds | None = None) -> None:
        self.unroll, self.trained, self.thresholds = unroll, trained, thresholds or THRESHOLDS
        self.pace = 0.0
        """seconds of a micro-batch; 0 until the first was trained on"""
        self.used = 1.0
        """share of the idle time that training gets: much of it comes in parts shorter than a micro-batch"""
        self.tried = 0
        """micro-batches that were trained on since the curve began"""
        self.unjudged = 0
        """those since the last judgement"""
        self.curve: Curve | None = None if trained else self._curve(0.0)
        self.starting, self.level = trained, 0.0
        """whether it is still seen what ln(1 - agreement) one that was trained before begins with; and that"""
        self.published = 0.0
        """ln(1 - agreement) of the drafter in use when it was published, on the curve"""
        self.moved = 0.0
        """that the target added to it since: the curve is of a target that stands still"""
        self.looks: deque[tuple[int, float]] = deque(maxlen=self.thresholds.level)
        """at the drafter in use since it was published: (rollout, ln(1 - agreement))"""
        self.resting_since = -1  # the rollout in which it was judged last
        self.rollouts = 0
        self.horizons: deque[Horizon] = deque(maxlen=self.thresholds.lately)
        self.costs: Sequence[RoundCosts] = ()
        self.decision: Decision | None = None
        """the last one; None until a rollout was seen, and the drafter"""
        self.made: list[Decision] = []
        """decisions that nobody has taken note of: see `taken_note`"""

    def _curve(self, miss: float) -> Curve:
        """Of a drafter that stands there, as if it had been trained from random weights."""
        self.published, self.moved, slope = miss, 0.0, self.thresholds.slope
        cold = self.thresholds.cold * (self.pace or self.thresholds.pace)
        return Curve(cold * math.exp(-miss / slope), miss, slope)

    def _miss(self, accept_length: float) -> float:
        return math.log(1 - agreement_of(accept_length, self.unroll))

    # -- what was measured ---------------------------------------------------------------------------------------------

    def fresh(self, accept_length: float) -> None:
        """Of the drafter in use, on a rollout that it was not looked at on before."""
        self.looks.append((self.rollouts, self._miss(accept_length)))
        if self.curve and self._has_fallen():
            self._begin_anew()
        elif self.starting and len(self.looks) < self.thresholds.level:
            self.level, _ = self._present()
            self.curve = self._curve(self.level)
        self._decide()

    def _has_fallen(self) -> bool:
        """By its looks of late; or by the last one alone, where that is far off from all before it."""
        known = self.published + self.moved + self.thresholds.fallen
        miss, error = self._present()
        *before, last = [miss for _, miss in self.looks]
        spread = max(Curve.NOISE, statistics.stdev(before)) if len(before) > 1 else math.inf
        return miss - self.thresholds.sure * error > known or last - self.thresholds.sure_of_drift * spread > known

    def _begin_anew(self) -> None:
        """The target moved away at once: what was seen before tells nothing, of learning neither, which is fast again
        where most is wrong."""
        self.looks = deque([self.looks[-1]], self.looks.maxlen)
        self.curve, self.starting, self.tried = self._curve(self.looks[-1][1]), False, 0

    def trained_for(self, report: SpotReport) -> None:
        """How far a second leads is known by the first judgement; until then, by how long micro-batches take."""
        if not report.micro_batches:
            return
        self.pace = report.seconds / report.micro_batches
        if self.curve and not self.curve.judged:
            self.curve = self._curve(self.curve.points[-1][1])
        self.tried += report.micro_batches
        self.unjudged += report.micro_batches

    def gained(self, in_use: float, candidate: float, seconds: float, published: bool = False) -> None:
        """So many seconds of training led from the candidate before to this one. One that is not finite led nowhere."""
        before, self.unjudged = self._miss(in_use), 0
        gain = self._miss(candidate) - before if math.isfinite(candidate) else 0.0
        self.curve, self.starting = self.curve or self._curve(before), False
        self.moved = (self._present()[0] if self.looks else before) - self.published
        self.curve.add(seconds, self.published + gain)
        self.resting_since = self.rollouts
        if published:  # it would have been seen so much better then too: both were judged on the same
            gain = min(0.0, max(gain, self.curve.now() - self.published))  # the best of many seems better than it is
            self.published += gain
            self.looks = deque([(rollout, min(0.0, miss + gain)) for rollout, miss in self.looks], self.looks.maxlen)
        self._decide()

    def rollout_ended(self, horizon: Horizon, costs: Sequence[RoundCosts] = (), trained: float = 0.0) -> None:
        """`trained`: seconds of training in it."""
        self.rollouts += 1
        if trained and horizon.idle_seconds:
            self.used += (min(1.0, trained / horizon.idle_seconds) - self.used) / self.thresholds.lately
        else:  # what was true when it last trained may no longer be
            self.used += (1.0 - self.used) / self.thresholds.level
        self.horizons.append(horizon)
        self.costs = costs or self.costs
        self._decide()

    # -- what is known of it -------------------------------------------------------------------------------------------

    def _present(self) -> tuple[float, float]:
        """ln(1 - agreement) of the drafter in use, and its error. Looks count by rounds, so that those at prompts which
        are drafted badly, and so take longer, count for more."""
        lately = [miss for _, miss in self.looks][-self.thresholds.lately :]
        if len(lately) < 2:
            return (lately or [0.0])[0], Curve.NOISE
        mean = statistics.harmonic_mean([accept_length(1 - math.exp(miss), self.unroll) for miss in lately])
        return self._miss(mean), max(Curve.NOISE, statistics.stdev(lately)) / math.sqrt(len(lately))

    def _drift(self) -> float:
        """That a step adds to ln(1 - agreement) of a drafter at rest, as far as it is sure."""
        looks = [(rollout, miss) for rollout, miss in self.looks if rollout > self.resting_since]
        if len(looks) < self.thresholds.lately:
            return 0.0
        rollouts, misses = zip(*looks, strict=True)
        slope, start = statistics.linear_regression(rollouts, misses)
        off = [miss - start - slope * rollout for rollout, miss in looks]
        noise = max(Curve.NOISE, math.sqrt(sum(x * x for x in off) / (len(off) - 2)))
        square = sum((rollout - statistics.fmean(rollouts)) ** 2 for rollout in rollouts)
        return max(0.0, slope - self.thresholds.sure_of_drift * noise / math.sqrt(square))

    def _learning(self, curve: Curve) -> Learning:
        """The pessimistic side of all that is known: it may stand higher already, and learn more slowly. While it is
        tried, it learns as expected."""
        miss, error = self._present()
        miss -= self.thresholds.sure * error
        _, b, doubt = curve.fit()
        slope = max(0.0, b - self.thresholds.sure * doubt)
        if self.tried < self.thresholds.trial:
            curve = curve.as_expected()
            slope = max(slope, curve.slope)
        known = not self.trained or curve.judged >= self.thresholds.measured or not self._is_useful(self.level)
        best = -math.inf if known else self.level
        return Learning(miss, curve.position(miss - self.moved), slope, best, self._drift())

    def _is_useful(self, miss: float) -> bool:
        agreement = 1 - math.exp(miss)
        if not self.costs:
            return agreement > self.thresholds.useful
        now, without = (mean_speed(speeds(a, self.costs, self.unroll)) for a in (agreement, 0.0))
        return now > without

    def _decide(self) -> None:
        if not self.horizons or self.curve is None:
            return
        last, count = self.horizons[-1], len(self.horizons)
        horizon = last._replace(
            rollout_seconds=sum(one.rollout_seconds for one in self.horizons) / count,
            idle_seconds=self.used * sum(one.idle_seconds for one in self.horizons) / count,
        )
        least = self.thresholds.least_saving
        self.decision = decide(self._learning(self.curve), horizon, self.costs, self.unroll, least)
        self.made.append(self.decision)

    # -- what is asked of it -------------------------------------------------------------------------------------------

    def should_train(self) -> bool:
        return self.decision.trains if self.decision else not self.trained

    def catch_up(self, most: float) -> float:
        """Seconds for which all workers are to train before the update: `most` times a rollout's. None where what they
        train is never judged."""
        if not self.decision or not self.pace or self.unjudged > self.thresholds.unjudged * self.thresholds.stretch:
            return 0.0
        return min(self.decision.catch_up, most * min(horizon.rollout_seconds for horizon in self.horizons))

    def saves(self, seconds: float) -> float:
        """Seconds that so much training is predicted to save in the steps that remain."""
        return self.decision.saved_by_a_second * seconds if self.decision and self.decision.trains else 0.0

    def taken_note(self) -> list[Decision]:
        """Decisions since this was last asked."""
        made, self.made = self.made, []
        return made

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        at = self.curve
        curve = at and [at.slope, list(at.start), [list(point) for point in at.points], at.judged]
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        trains = {"trained": self.trained, "horizons": [list(horizon) for horizon in self.horizons]}
        return {"curve": curve, "looks": [list(look) for look in self.looks], **numbers, **trains}

    def load_state(self, state: Mapping[str, Any]) -> None:
        curve = state.get("curve")
        if curve and len(curve) < 4:  # of an older run, which judged by other means
            return
        if curve:
            slope, start, points, judged = curve
            self.curve = Curve.of(slope, tuple(start), [(seconds, miss) for seconds, miss in points], judged)
        self.trained = state.get("trained", self.trained)
        self.looks.extend((rollout, miss) for rollout, miss in state.get("looks", ()))
        for name in _NUMBERS:
            setattr(self, name, state.get(name, getattr(self, name)))
        self.horizons.extend(Horizon(*horizon) for horizon in state.get("horizons", ()))
        self._decide()
