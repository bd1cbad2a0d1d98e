"""Whether training the drafter pays: plain arithmetic on what the gate measured.

Two things are known of a drafter: what each judged stretch of training gained (the candidate against the one in use,
on the same held-back harvest), and its accept length on fresh harvest, step after step, while the target moves. A round
takes as long whatever its drafter has learned, so that accepted tokens per second go as accept length does. So it
trains while that gains; then it rests; and it trains again once its accept length has fallen, by more than it varies
from step to step by itself. One that was trained before, and is of use, starts at rest: what it could gain from the
target it was made for it has.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Thresholds:
    """All that the drafter's life is decided by; accept lengths are means of `SpotTrainer.judge`."""

    stretch: int = 32
    """micro-batches, of all workers, that are judged together: judging takes as long as three"""
    judged: int = 4
    """micro-batches of held-back harvest that a candidate is judged by"""
    better: float = 1.02
    """times the drafter in use, what a candidate must be to go live: a judgement errs by about that, and a swap costs a
    pass over the windows of all live rows"""
    looks: float = 0.02
    """of the workers' time in rollouts, what looks at a drafter at rest may take"""
    tries: int = 4
    """judgements that a slope is taken over"""
    least_gain: float = 0.01
    """relative, of a judged stretch: training slows those who decode beside it, and less does not repay"""
    useful: float = 0.4
    """of a chain's guesses right: a drafter below that learns on, from harvest that is to come"""
    level: int = 8
    """steps that the accept length at rest is a mean of"""
    lately: int = 4
    """and that it is compared with"""
    stale: float = 0.02
    """relative fall that is worth training for"""
    sure: float = 2.0
    """standard errors that it must be"""
    horizon: float = 20.0
    """rollouts that a gain lasts"""


THRESHOLDS = Thresholds()


class SpotReport(NamedTuple):
    """What a call to train did."""

    micro_batches: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Judgement(NamedTuple):
    """A candidate and the drafter in use on the same held-back harvest; sums over its entries."""

    entries: int = 0
    in_use: float = 0.0
    """what a chain of `unroll` guesses of the drafter in use would commit per pass"""
    candidate: float = 0.0
    """likewise of the candidate, if there is one"""
    first: float = 0.0
    """how often the candidate's first guess is right"""
    broken_off: bool = False
    """these are the parts that were done by then"""
    seconds: float = 0.0
    """that it took the workers"""

    @property
    def is_better(self) -> bool:
        """Whether the candidate is to go live: never one that is NaN, or was not judged."""
        return math.isfinite(self.candidate) and self.candidate > THRESHOLDS.better * self.in_use


def summed(judgements: Iterable[Judgement]) -> Judgement:
    """Of several parts, or workers."""
    entries, in_use, candidate, first, broken_off, seconds = list(zip(*judgements, strict=True)) or [()] * 6
    return Judgement(sum(entries), sum(in_use), sum(candidate), sum(first), any(broken_off), sum(seconds))


class TrainingGate:
    """Accept lengths are means of `SpotTrainer.judge`, of chains of `unroll` guesses."""

    def __init__(self, unroll: int, trained: bool = False, thresholds: Thresholds | None = None) -> None:
        self.thresholds = thresholds or THRESHOLDS
        self.useful = 1 + self.thresholds.useful * unroll
        self.gains: deque[tuple[float, float]] = deque(
            maxlen=self.thresholds.tries
        )  # relative, and the seconds of training
        self.level: deque[float] = deque(
            maxlen=self.thresholds.level
        )  # accept lengths before it came to rest, or the first ones then
        self.lately: deque[float] = deque(maxlen=self.thresholds.lately)  # since
        self.resting = trained

    def fresh(self, accept_length: float) -> None:
        """Once a step: of the drafter in use, on harvest of the present target."""
        if not self.resting or len(self.level) < self.thresholds.level:
            self.level.append(accept_length)
        else:
            self.lately.append(accept_length)
        if self.resting and ((len(self.lately) == self.thresholds.lately and self._fallen()) or not self._is_useful()):
            self.resting = False
            self.gains.clear()
            self.level.clear()
            self.lately.clear()

    def _is_useful(self) -> bool:
        """Unknown, as it was found stale a moment ago, it is not."""
        return bool(self.level) and statistics.fmean(self.level) >= self.useful

    def _fallen(self) -> bool:
        level, now = statistics.fmean(self.level), statistics.fmean(self.lately)
        error = statistics.stdev(self.level) * math.sqrt(1 / self.thresholds.level + 1 / self.thresholds.lately)
        return level - now > max(self.thresholds.stale * level, self.thresholds.sure * error)

    def gained(self, in_use: float, candidate: float, seconds: float) -> None:
        """A stretch of training was judged: both accept lengths on the same harvest, and the seconds it took since the
        judgement before. A candidate that is not finite gained nothing."""
        gain = candidate / in_use - 1
        self.gains.append((gain if math.isfinite(gain) else 0.0, seconds))
        if len(self.gains) == self.thresholds.tries and self._is_useful() and self._gains_nothing():
            self.resting = True

    def _gains_nothing(self) -> bool:
        """For sure: gains on a few held-back prompts are large and of both signs."""
        gains = [gain for gain, _ in self.gains]
        return (
            statistics.fmean(gains) + statistics.stdev(gains) / math.sqrt(self.thresholds.tries)
            < self.thresholds.least_gain
        )

    def should_train(self) -> bool:
        """Whether idle time is to be trained in: not by a drafter that no longer gains, but again by one that went
        stale."""
        return not self.resting

    @property
    def is_known(self) -> bool:
        """Whether the slope of its gains is."""
        return len(self.gains) == self.thresholds.tries

    def saves(self, seconds: float, rollout_seconds: float) -> float:
        """Seconds that so much training is predicted to save in the rollouts to come, each of so many seconds: as
        accept length grows, they shrink. 0 as long as the slope is not measured."""
        if self.resting or len(self.gains) < self.thresholds.tries:
            return 0.0
        gain, spent = (sum(column) for column in zip(*self.gains, strict=True))
        return max(0.0, gain / max(spent, 1e-9)) * seconds * rollout_seconds * self.thresholds.horizon

    def pays_back(self, rollout_seconds: float) -> bool:
        """Whether a second of training that is *not* idle time saves more than that. Until the slope is measured, it
        is tried."""
        if len(self.gains) < self.thresholds.tries:
            return self.should_train()
        return self.saves(1.0, rollout_seconds) > 1.0

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        kept = {"gains": self.gains, "level": self.level, "lately": self.lately}
        return {name: list(values) for name, values in kept.items()} | {"resting": self.resting}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.gains.extend((gain, seconds) for gain, seconds in state["gains"])
        self.level.extend(state["level"])
        self.lately.extend(state["lately"])
        self.resting = state["resting"]
