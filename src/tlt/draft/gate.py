"""Decides whether training the drafter pays: `horizon.decide` on what was measured in this run, within a stake.

A look measures the accept length of the drafter in use on a new rollout, alone or beside a candidate. Each rollout says
how long it took, how long workers were idle in it, and what its rounds cost. From that follows what training would save
before the run is over, if the drafter learns as it lately did, or as drafters did elsewhere. Whether it does is not
known, so training has a stake. For a drafter that fell or began at random it may cost half of what one would save that
is as good as this one was before, or as drafters were elsewhere: that can most likely be reached. And it may cost a
twentieth of what a perfect drafter would save; for a drafter that was trained before and did not fall, a hundredth.
Published drafters that are better renew the stake. So training that leads to nothing ends, and a drafter that fell is
trained until it is back.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tlt.draft.horizon import (
    Decision,
    Horizon,
    Learning,
    RoundCosts,
    accept_length,
    agreement_of,
    decide,
    mean_speed,
    miss_at,
    speeds,
    weights,
)
from tlt.draft.slope import FittedSlope


@dataclass(frozen=True)
class Thresholds:
    """The constants that decide the drafter's life, and first values for what is measured in the run. How much harvest
    training needs is in spot.py."""

    stretch: int = 16
    """micro-batches, over all workers, that a candidate consists of: judging it takes as long as three to five"""
    judged: int = 2
    """micro-batches of harvest that a candidate is judged on"""
    better: float = 1.02
    """how many times the accept length of the drafter in use a candidate must have: a judgement errs by about 2 %"""
    looks: float = 0.02
    """fraction of the workers' time in rollouts that looks at a drafter at rest may take"""
    settled_looks: float = 0.005
    """the same for one that was trained before and did not fall, once `looked` looks are known: a sudden fall shows in
    the speed of rollouts"""
    surprise: float = 0.25
    """there is a look at once where a rollout gains less than this fraction of the speed, in multiples of plain
    decoding, that it should gain by the drafter in use"""
    least_gain: float = 0.1
    """where it should gain less than this, nothing is surprising"""
    least_saving: float = 0.01
    """fraction of the rollouts to come that training must save beyond its costs"""
    stake: float = 0.01
    """fraction of what a perfect drafter would save in the rollouts to come that training may cost until it has led
    further, for one that was trained before and did not fall"""
    learning_stake: float = 0.05
    """the same for one that fell or began at random"""
    likely_stake: float = 0.5
    """and for such a one also this fraction of what a drafter would save whose level can most likely be reached"""
    reachable: float = 0.8
    """agreement that can most likely be reached, beside the best level in this run: 0.79 to 0.81 was reached from
    random weights in two minutes of one core"""
    renews: float = 1.05
    """the stake is renewed once drafters that are better by this factor in sum were published: one alone may be better
    by luck"""
    held_up: float = 0.5
    """fraction of the stake up to which workers may catch up; the rest is for idle time"""
    passes: float = 2.0
    """workers catch up until so many times the entries harvested since the drafter fell were trained on: three passes
    bring it back a few steps earlier, and cost more than that saves"""
    sure: float = 1.0
    """standard errors by which looks are shifted against training"""
    lately: int = 4
    """number of last looks, or rollouts, whose mean is the present value"""
    looked: int = 8
    """number of last looks that a new one is compared with"""
    noise: float = 0.2
    """least standard deviation of a look, in ln(1 - agreement)"""
    fallen: float = 0.2
    """in agreement: the target moved away at once where a look is worse than the mean of those before it by so much and
    by four of their standard deviations"""
    drifted: float = 0.3
    """in ln(1 - agreement): it moved away little by little where the mean of the last looks is worse than the best so
    far by so much and by one of their standard deviations"""
    slope: float = 0.75
    """b of the law of learning, until it is measured in the run: 0.73 was measured over 420 micro-batches after a
    change of the task, at two new prompts a step"""
    settled_slope: float = 0.25
    """the same for one that was trained before and did not fall: it is where training led, and 158 micro-batches were
    measured to bring nothing"""
    slope_known: float = 0.2
    """weight of that value against what is measured, in ln of seconds of training"""
    slope_keeps: float = 0.9
    """at each look, what was measured of it is multiplied by this"""
    cold: int = 40
    """micro-batches added to the training of a random drafter, so that the law begins at agreement 0"""
    pace: float = 0.075
    """seconds of a micro-batch, until the first was trained on"""
    second_costs: float = 0.12
    """seconds of decoding beside it that a second of training costs, until measured in the run; 0.08 to 0.17 were
    measured elsewhere"""
    unknown_steps: int = 50
    """steps assumed to remain in a run whose end is not known"""


THRESHOLDS = Thresholds()
_NUMBERS = ("trained", "pace", "used", "staked", "better", "fell", "level", "best", "live")
"""attributes of a gate that its checkpoint holds as they are"""


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

    def is_better(self, times: float = THRESHOLDS.better) -> bool:
        """Whether the candidate is to go live, as its accept length is more than so many times that of the drafter in
        use. One that is NaN, or was not judged, is not."""
        return self.in_use > times * self.candidate > 0.0


def summed(judgements: Iterable[Judgement]) -> Judgement:
    """The sum of the judgements of several parts, or of several workers."""
    entries, in_use, candidate, first, broken_off, seconds = list(zip(*judgements, strict=True)) or [()] * 6
    return Judgement(sum(entries), sum(in_use), sum(candidate), sum(first), any(broken_off), sum(seconds))


class TrainingGate:
    """Keeps what was measured, and decides. Accept lengths are entries per round, with `unroll` guesses a chain."""

    def __init__(self, unroll: int, trained: bool = False, thresholds: Thresholds | None = None) -> None:
        self.unroll, self.trained, self.thresholds = unroll, trained, thresholds or THRESHOLDS
        self.pace = self.thresholds.pace
        self.used = 1.0
        """fraction of the idle time that training gets: much of it comes in parts shorter than a micro-batch"""
        self.staked = 0.0
        """seconds that training has cost since the stake was last renewed, or since the target moved away"""
        self.better = 1.0
        """by which factor the drafters published since are better, in sum"""
        self.fell = False
        """whether the target moved away in this run: such a drafter may catch up, as it was better before"""
        self.level = self.best = 0.0
        """best mean of `looks` since the drafter fell, and in this run"""
        self.live = 1.0
        """ln(1 - agreement) by the speed of rollouts, as a multiple of what looks say; at most 1. Looks flatter a
        drafter that learns, as it is worst in the few long responses that take most of the time. It stays 1 for one
        that was trained before and did not fall: what that lacks in rollouts, training did not give it"""
        self.slope = self._first_slope()
        """measured on candidates since the drafter fell"""
        self.surprised = False
        """whether rollouts became far slower than they should be, and the drafter in use was not looked at since"""
        self._is_slow = False  # whether the last rollout was far slower than it should be
        self.beyond = 0.0
        """seconds of training since the drafter in use was published"""
        self.harvested = self.learned = 0
        """entries harvested, and entries trained on, since the drafter fell or the run was resumed"""
        self.looks: deque[float] = deque(maxlen=self.thresholds.looked)
        """ln(1 - agreement) at each look; a publication shifts earlier looks by what it gained"""
        self.horizons: deque[Horizon] = deque(maxlen=self.thresholds.lately)
        self.costs: Sequence[RoundCosts] = ()
        self.decision: Decision | None = None
        """the last decision; None until a rollout has ended and, of a drafter trained before, there was a look"""
        self.made: list[Decision] = []
        """decisions that `taken_note` has not returned yet"""

    def _first_slope(self) -> FittedSlope:
        prior = self.thresholds.slope if self._learns else self.thresholds.settled_slope
        return FittedSlope(prior, self.thresholds.slope_known, self.thresholds.slope_keeps)

    def _miss(self, accept_length: float) -> float:
        return math.log(1 - agreement_of(accept_length, self.unroll))

    # -- what was measured ---------------------------------------------------------------------------------------------

    def fresh(self, accept_length: float) -> bool:
        """Note a look: the accept length of the drafter in use, on a rollout that had no look so far. Returns whether
        the target moved away at once, so that earlier harvest is of another task."""
        miss = self._miss(accept_length)
        self.surprised = False
        self.slope.fade()  # so that what was measured does not hold for ever where nothing is trained
        at_once, slowly = self._has_fallen(miss)
        if at_once or slowly:  # earlier looks no longer hold
            self.best = min(self.best, statistics.fmean(self.looks))
            self.looks.clear()
            self.fell, self.level, self.better, self.staked, self.live = True, 0.0, 1.0, 0.0, 1.0
            self.harvested = self.learned = 0
            self.slope, self.beyond = self._first_slope(), 0.0
        self.looks.append(miss)
        if len(self.looks) == self.looks.maxlen:
            self.level = min(self.level, statistics.fmean(self.looks))
            self.best = min(self.best, self.level)
        self._decide()
        return at_once

    def _has_fallen(self, miss: float) -> tuple[bool, bool]:
        """Whether the target moved away: at once, or little by little from the best level so far."""
        if len(self.looks) < self.thresholds.lately:
            return False, False
        mean, spread = statistics.fmean(self.looks), statistics.stdev(self.looks)
        wrong = [math.exp(look) for look in self.looks]
        fall = math.exp(miss) - statistics.fmean(wrong)
        least = self.thresholds.noise * statistics.fmean(wrong)  # few looks may be alike by chance
        at_once = fall > max(self.thresholds.fallen, 4 * max(least, statistics.stdev(wrong)))
        return at_once, mean > self.level + self.thresholds.drifted + spread

    def trained_for(self, report: SpotReport) -> None:
        """Note a training call."""
        if report.micro_batches:
            self.pace = report.seconds / report.micro_batches or self.pace
            self.learned += report.tokens
            self.beyond += report.seconds
            self._pay(report.seconds)

    def held_up(self, seconds: float, trained: float = 0.0) -> None:
        """Workers caught up for so many seconds. The worker seconds `trained` in these slowed nobody down."""
        self._pay(-trained)
        self.staked = max(0.0, self.staked) + seconds

    def gained(self, in_use: float, candidate: float, seconds: float, published: bool = False) -> None:
        """Note the judged accept lengths of the drafter in use and of a candidate, and the worker seconds that the
        judgement took."""
        self._pay(seconds)
        gain = self._miss(in_use) - self._miss(candidate) if candidate > 0.0 else 0.0
        if self.beyond:  # else it was trained before the fall that its judgement showed
            self.slope.judged(self.live * gain, math.log1p(self.beyond / self._learning().seconds))
        if published:  # earlier looks would have been as much better: both were judged on the same harvest
            self.beyond = 0.0
            self.looks = deque([min(0.0, miss - gain) for miss in self.looks], self.looks.maxlen)
            self.better *= candidate / in_use
            if self.better >= self.thresholds.renews:
                self.better, self.staked = 1.0, 0.0
        self._decide()

    def _pay(self, worker_seconds: float) -> None:
        """Add to `staked` what so many worker seconds of training or judging cost those who decode."""
        beside = self.horizons[-1].second_costs if self.horizons else self.thresholds.second_costs
        self.staked += beside * worker_seconds

    def rollout_ended(self, horizon: Horizon, costs: Sequence[RoundCosts] = (), trained: float = 0.0) -> None:
        """Note a finished rollout; `trained` are the seconds of training in it."""
        if trained and horizon.idle_seconds:
            self.used += (min(1.0, trained / horizon.idle_seconds) - self.used) / self.thresholds.lately
        else:  # the fraction was measured when it last trained, and may no longer hold
            self.used += (1.0 - self.used) / self.thresholds.looked
        self._notice(horizon.speed)
        self.harvested += horizon.entries
        if self.horizons and horizon.version is not None and horizon.version == self.horizons[-1].version:
            horizon = self.horizons.pop().followed_by(horizon)
        self.horizons.append(horizon)
        self.costs = costs or self.costs
        self._compare(horizon.speed)
        self._decide()

    def _notice(self, speed: float) -> None:
        """Ask for a look where a rollout is far slower than the last decision says, but for no other one while rollouts
        stay as slow."""
        if not self.decision or not self.costs or not speed:
            return
        plain = weights(self.costs) * speeds(self.decision.agreement, self.costs, self.unroll)
        without = mean_speed(np.array([one.fallback for one in self.costs]), plain)
        gain = self.decision.speed - without
        slow = bool(gain > self.thresholds.least_gain and speed < without + self.thresholds.surprise * gain)
        self.surprised = slow and (self.surprised or not self._is_slow)
        self._is_slow = slow

    def _compare(self, speed: float) -> None:
        """Compare what looks say with the speed of a rollout."""
        found = miss_at(speed, self.costs, self.unroll) if self._learns and self.costs and self.looks else None
        if found is not None:
            ratio = found / min(-self.thresholds.noise, self._looked())
            self.live += (min(1.0, ratio) - self.live) / self.thresholds.lately

    @property
    def _learns(self) -> bool:
        """Whether it is on its way to a level that can most likely be reached. One that was trained before, and did not
        fall, is where training led: harder prompts do not mean that it was better before."""
        return self.fell or not self.trained

    # -- what is decided -----------------------------------------------------------------------------------------------

    def _lately(self) -> list[float]:
        return list(self.looks)[-self.thresholds.lately :] or [0.0]

    def _looked(self) -> float:
        """ln(1 - agreement) of the drafter in use by its last looks. They count by rounds: the mean is harmonic, so
        that prompts which are drafted badly count for more."""
        lengths = [accept_length(1 - math.exp(miss), self.unroll) for miss in self._lately()]
        return self._miss(statistics.harmonic_mean(lengths))

    def _present(self) -> float:
        """ln(1 - agreement) by looks and rollouts, less a standard error, as it may already be better."""
        lately = self._lately()
        spread = statistics.stdev(lately) if len(lately) > 1 else 0.0
        error = self.thresholds.sure * max(self.thresholds.noise, spread) / math.sqrt(len(lately))
        return self.live * (self._looked() - error)

    def _learning(self) -> Learning:
        """A drafter stands on the law as if it had been trained from random weights to where it is. It learns on as
        steeply as lately; one on its way to a level that can most likely be reached, as drafters elsewhere at least."""
        miss = self._present()
        seconds = self.thresholds.cold * self.pace * math.exp(-miss / self.thresholds.slope)
        slope = max(self.thresholds.slope, self.slope.value) if self._learns else self.slope.value
        return Learning(miss, seconds, slope)

    def _decide(self) -> None:
        if not self.horizons or (self.trained and not self.looks):
            return
        last, count = self.horizons[-1], len(self.horizons)
        horizon = last._replace(
            rollout_seconds=sum(one.rollout_seconds for one in self.horizons) / count,
            idle_seconds=self.used * sum(one.idle_seconds for one in self.horizons) / count,
            workers=last.workers if self.fell else 0,
        )
        reachable = self.live * min(self.best, math.log(1 - self.thresholds.reachable))
        made = decide(self._learning(), horizon, self.costs, self.unroll, self.thresholds.least_saving, reachable)
        stake = self.thresholds.stake * made.perfect
        if self._learns:
            stake = self.thresholds.likely_stake * made.reachable + self.thresholds.learning_stake * made.perfect
        self.decision = made._replace(trains=made.trains and self.staked < stake, stake=stake, staked=self.staked)
        self.made.append(self.decision)

    # -- what is asked of it -------------------------------------------------------------------------------------------

    def looks_may_take(self) -> float:
        """Fraction of the workers' time in rollouts. It is smaller for a drafter that was trained before and did not
        fall, where a fall would show in the speed of rollouts, and enough looks are known to tell one."""
        shows = self.costs and not self._is_slow and len(self.looks) == self.looks.maxlen
        return self.thresholds.settled_looks if shows and not self._learns else self.thresholds.looks

    def should_train(self) -> bool:
        return self.decision.trains if self.decision else not self.trained

    def catch_up(self, most: float) -> float:
        """Seconds for which all workers are to train before the update, at most `most` times those of the shortest of
        the last rollouts. It is to be asked again while they do."""
        if not self.decision or not self.decision.trains:
            return 0.0
        if self.learned >= self.thresholds.passes * self.harvested:
            return 0.0
        left = self.thresholds.held_up * self.decision.stake - self.staked
        longest = most * min(horizon.rollout_seconds for horizon in self.horizons)
        return max(0.0, min(self.decision.catch_up, longest, left))

    def saves(self, seconds: float) -> float:
        """Seconds that so many seconds of training are predicted to save in the steps that remain."""
        return self.decision.saved_by_a_second * seconds if self.decision and self.decision.trains else 0.0

    def taken_note(self) -> list[Decision]:
        """Decisions since the last call of this."""
        made, self.made = self.made, []
        return made

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        horizons = [list(horizon) for horizon in self.horizons]
        costs = [[one.weight, one.plain, list(one.drafted.items()), one.fallback] for one in self.costs]
        slope, looks = self.slope.state(), list(self.looks)
        return {**numbers, "slope": slope, "looks": looks, "horizons": horizons, "costs": costs}

    def load_state(self, state: Mapping[str, Any]) -> None:
        state = {"live": 1.0, "slope": self.slope.state(), "costs": [], **state}
        if not state.keys() >= {*_NUMBERS, "looks", "horizons"}:  # of an older version, which measured other things
            return
        for name in _NUMBERS:
            setattr(self, name, state[name])
        self.slope = self._first_slope()
        self.slope.load_state(state["slope"])
        self.looks.extend(state["looks"])
        self.horizons.extend(Horizon(*horizon) for horizon in state["horizons"])
        self.costs = [RoundCosts(weight, plain, dict(chains), rest) for weight, plain, chains, rest in state["costs"]]
        self._decide()
