"""Decides whether training the drafter pays: `horizon.decide` on what was measured in this run.

A look measures the accept length of the drafter in use on a new rollout. Each judged stretch of training says how far
that much training led. Each rollout says how long it took, how long workers were idle in it, and what its rounds cost.
A drafter that was trained before, and is of use, starts at rest: it is assumed to have learned what its target can
teach, until looks show that its agreement fell.
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
    """All constants that decide the drafter's life, and first values for what is measured in the run."""

    stretch: int = 16
    """micro-batches, over all workers, that a candidate consists of: judging it takes as long as two to four"""
    judged: int = 2
    """micro-batches of harvest that a candidate is judged on"""
    better: float = 1.02
    """a candidate goes live with so many times the accept length of the drafter in use: a judgement errs by about 2 %,
    and a swap costs a pass over the windows of all live rows"""
    looks: float = 0.02
    """fraction of the workers' time in rollouts that looks at a drafter at rest may take"""
    least_saving: float = 0.01
    """fraction of the rollouts to come that training must save beyond its costs"""
    sure: float = 1.0
    """standard errors by which measurements are shifted against training"""
    sure_of_drift: float = 2.0
    """standard errors by which a drift at rest must differ from 0, or one look from those before it"""
    lately: int = 4
    """number of last looks, or rollouts, whose mean is the present value"""
    level: int = 8
    """number of last looks for the drift at rest, and of first looks for the level of a drafter trained before"""
    fallen: float = 0.2
    """in ln(1 - agreement): so far above the training curve, the target is held to have moved away"""
    slope: float = 0.75
    """b of the training curve before any judgement: 0.73 was measured over 420 micro-batches after a change of the
    task, at two new prompts a step"""
    cold: int = 40
    """micro-batches added to the training of a random drafter, so that the curve begins at agreement 0"""
    pace: float = 0.075
    """seconds of a micro-batch, until the first was trained on"""
    trial: int = 400
    """micro-batches after the start, or after such a fall, for which `slope` is the least slope assumed: the first
    judgements are about weights and harvest that are mostly from before"""
    unjudged: int = 4
    """stretches without a judgement, after which workers no longer catch up"""
    measured: int = 8
    """judgements after which the curve of a drafter trained before is known beyond its first level"""
    second_costs: float = 0.12
    """seconds of decoding beside it that a second of training costs, until measured in the run; 0.08 to 0.17 were
    measured elsewhere"""
    unknown_steps: int = 50
    """steps assumed to remain in a run whose end is not known"""
    useful: float = 0.4
    """agreement above which a drafter is of use, as long as no seconds of rounds are known"""


THRESHOLDS = Thresholds()
_NUMBERS = ("level", "starting", "published", "moved", "resting_since", "rollouts", "pace", "used", "tried")
"""attributes of a gate that its checkpoint holds"""


class SpotReport(NamedTuple):
    """What one training call did."""

    micro_batches: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Judgement(NamedTuple):
    """Compares a candidate with the drafter in use, on the same harvest."""

    entries: int = 0
    in_use: float = 0.0
    """expected rounds in which the drafter in use would decode these entries, with chains of `unroll` guesses"""
    candidate: float = 0.0
    """the same for the candidate, if there is one"""
    first: float = 0.0
    """expected number of the candidate's rounds whose first guess is right"""
    broken_off: bool = False
    """whether it was broken off; then the numbers are of the parts done by then"""
    seconds: float = 0.0
    """worker seconds that it took"""

    @property
    def is_better(self) -> bool:
        """Whether the candidate is to go live. One that is NaN, or was not judged, is not."""
        return self.in_use > THRESHOLDS.better * self.candidate > 0.0


def summed(judgements: Iterable[Judgement]) -> Judgement:
    """The sum of the judgements of several parts, or of several workers."""
    entries, in_use, candidate, first, broken_off, seconds = list(zip(*judgements, strict=True)) or [()] * 6
    return Judgement(sum(entries), sum(in_use), sum(candidate), sum(first), any(broken_off), sum(seconds))


class TrainingGate:
    """Keeps what was measured, and decides. Accept lengths are entries per round, with `unroll` guesses a chain."""

    def __init__(self, unroll: int, trained: bool = False, thresholds: Thresholds | None = None) -> None:
        self.unroll, self.trained, self.thresholds = unroll, trained, thresholds or THRESHOLDS
        self.pace = 0.0
        """seconds of a micro-batch; 0 until the first was trained on"""
        self.used = 1.0
        """fraction of the idle time that training gets: much of it comes in parts shorter than a micro-batch"""
        self.tried = 0
        """micro-batches that were trained on since the curve began"""
        self.unjudged = 0
        """micro-batches that were trained on since the last judgement"""
        self.curve: Curve | None = None if trained else self._curve(0.0)
        self.starting, self.level = trained, 0.0
        """whether the level of a drafter trained before is still being measured; and that, as ln(1 - agreement)"""
        self.published = 0.0
        """ln(1 - agreement) of the drafter in use when it was published, on the curve"""
        self.moved = 0.0
        """what the target has added to it since: the curve is of a target that stands still"""
        self.looks: deque[tuple[int, float]] = deque(maxlen=self.thresholds.level)
        """(rollout, ln(1 - agreement)) of each look; a publication shifts earlier looks by what it gained"""
        self.resting_since = -1  # the rollout in which a candidate was judged last
        self.rollouts = 0
        self.horizons: deque[Horizon] = deque(maxlen=self.thresholds.lately)
        self.costs: Sequence[RoundCosts] = ()
        self.decision: Decision | None = None
        """the last decision; None until a rollout has ended and there is a curve"""
        self.made: list[Decision] = []
        """decisions that `taken_note` has not returned yet"""

    def _curve(self, miss: float) -> Curve:
        """The curve of a drafter with this ln(1 - agreement), as if it had been trained from random weights.
        `published` and `moved` begin anew."""
        self.published, self.moved, slope = miss, 0.0, self.thresholds.slope
        cold = self.thresholds.cold * (self.pace or self.thresholds.pace)
        return Curve(cold * math.exp(-miss / slope), miss, slope)

    def _miss(self, accept_length: float) -> float:
        return math.log(1 - agreement_of(accept_length, self.unroll))

    # -- what was measured ---------------------------------------------------------------------------------------------

    def fresh(self, accept_length: float) -> None:
        """Note a look: the accept length of the drafter in use, on a rollout that had no look so far."""
        self.looks.append((self.rollouts, self._miss(accept_length)))
        if self.curve and self._has_fallen():
            self._begin_anew()
        elif self.starting and len(self.looks) < self.thresholds.level:
            self.level, _ = self._present()
            self.curve = self._curve(self.level)
        self._decide()

    def _has_fallen(self) -> bool:
        """Whether the agreement fell below the curve: by the mean of the last looks, or by the last look alone where
        that is far from all before it."""
        known = self.published + self.moved + self.thresholds.fallen
        miss, error = self._present()
        *before, last = [miss for _, miss in self.looks]
        spread = max(Curve.NOISE, statistics.stdev(before)) if len(before) > 1 else math.inf
        return miss - self.thresholds.sure * error > known or last - self.thresholds.sure_of_drift * spread > known

    def _begin_anew(self) -> None:
        """Begin a new curve, as the target moved away at once. Earlier looks and judgements no longer hold; learning,
        too, is fast again where most guesses are wrong."""
        self.looks = deque([self.looks[-1]], self.looks.maxlen)
        self.curve, self.starting, self.tried = self._curve(self.looks[-1][1]), False, 0

    def trained_for(self, report: SpotReport) -> None:
        """Note a training call. Until the first judgement, the curve is scaled by the seconds of a micro-batch."""
        if not report.micro_batches:
            return
        self.pace = report.seconds / report.micro_batches
        if self.curve and not self.curve.judged:
            self.curve = self._curve(self.curve.points[-1][1])
        self.tried += report.micro_batches
        self.unjudged += report.micro_batches

    def gained(self, in_use: float, candidate: float, seconds: float, published: bool = False) -> None:
        """Note the judged accept lengths of the drafter in use and of a candidate, and the seconds of training since
        the candidate before. A candidate that is not finite gained nothing."""
        before, self.unjudged = self._miss(in_use), 0
        gain = self._miss(candidate) - before if math.isfinite(candidate) else 0.0
        self.curve, self.starting = self.curve or self._curve(before), False
        self.moved = (self._present()[0] if self.looks else before) - self.published
        self.curve.add(seconds, self.published + gain)
        self.resting_since = self.rollouts
        if published:  # earlier looks would have been as much better: both were judged on the same harvest
            gain = min(0.0, max(gain, self.curve.now() - self.published))  # the best of many seems better than it is
            self.published += gain
            self.looks = deque([(rollout, min(0.0, miss + gain)) for rollout, miss in self.looks], self.looks.maxlen)
        self._decide()

    def rollout_ended(self, horizon: Horizon, costs: Sequence[RoundCosts] = (), trained: float = 0.0) -> None:
        """Note a finished rollout; `trained` are the seconds of training in it."""
        self.rollouts += 1
        if trained and horizon.idle_seconds:
            self.used += (min(1.0, trained / horizon.idle_seconds) - self.used) / self.thresholds.lately
        else:  # the fraction was measured when it last trained, and may no longer hold
            self.used += (1.0 - self.used) / self.thresholds.level
        self.horizons.append(horizon)
        self.costs = costs or self.costs
        self._decide()

    # -- what is known of it -------------------------------------------------------------------------------------------

    def _present(self) -> tuple[float, float]:
        """ln(1 - agreement) of the drafter in use by its last looks, and its standard error. Looks count by rounds: the
        mean is harmonic, so that prompts which are drafted badly count for more."""
        lately = [miss for _, miss in self.looks][-self.thresholds.lately :]
        if len(lately) < 2:
            return (lately or [0.0])[0], Curve.NOISE
        mean = statistics.harmonic_mean([accept_length(1 - math.exp(miss), self.unroll) for miss in lately])
        return self._miss(mean), max(Curve.NOISE, statistics.stdev(lately)) / math.sqrt(len(lately))

    def _drift(self) -> float:
        """What a step adds at least to ln(1 - agreement) of a drafter at rest: the lower bound of the slope of a linear
        regression over its looks, or 0."""
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
        """The pessimistic side of all that is known: the drafter may already be better, and learn more slowly. During
        the trial it learns as expected."""
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
        """Seconds for which all workers are to train before the update, at most `most` times those of the shortest of
        the last rollouts. 0 where training has gone on for long without a judgement."""
        if not self.decision or not self.pace or self.unjudged > self.thresholds.unjudged * self.thresholds.stretch:
            return 0.0
        return min(self.decision.catch_up, most * min(horizon.rollout_seconds for horizon in self.horizons))

    def saves(self, seconds: float) -> float:
        """Seconds that so many seconds of training are predicted to save in the steps that remain."""
        return self.decision.saved_by_a_second * seconds if self.decision and self.decision.trains else 0.0

    def taken_note(self) -> list[Decision]:
        """Decisions since the last call of this."""
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
        if curve and len(curve) < 4:  # of an older version, which judged in another way
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
