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
from collections.abc import Mapping
from typing import Any

STRETCH = 32  # micro-batches, of all workers, that are judged together, which takes as long as three
_TRIES = 4  # judgements that a slope is taken over
_LEAST = 0.01  # relative gain of a judged stretch: training slows those who decode beside it, and less does not repay
_USEFUL = 0.4  # of a chain's guesses right: a drafter below that learns on, from harvest that is to come
_LEVEL = 8  # steps that the accept length at rest is a mean of
_LATELY = 4  # and that it is compared with
_STALE = 0.02  # relative fall that is worth training for
_SURE = 2.0  # standard errors that it must be
_HORIZON = 20.0  # rollouts that a gain lasts


class TrainingGate:
    """Accept lengths are means of `SpotTrainer.judge`, of chains of `unroll` guesses."""

    def __init__(self, unroll: int, trained: bool = False) -> None:
        self.useful = 1 + _USEFUL * unroll
        self.gains: deque[tuple[float, float]] = deque(maxlen=_TRIES)  # relative, and the seconds of training
        self.level: deque[float] = deque(maxlen=_LEVEL)  # accept lengths before it came to rest, or the first ones then
        self.lately: deque[float] = deque(maxlen=_LATELY)  # since
        self.resting = trained

    def fresh(self, accept_length: float) -> None:
        """Once a step: of the drafter in use, on harvest of the present target."""
        if not self.resting or len(self.level) < _LEVEL:
            self.level.append(accept_length)
        else:
            self.lately.append(accept_length)
        if self.resting and ((len(self.lately) == _LATELY and self._fallen()) or not self._is_useful()):
            self.resting = False
            self.gains.clear()
            self.level.clear()
            self.lately.clear()

    def _is_useful(self) -> bool:
        """Unknown, as it was found stale a moment ago, it is not."""
        return bool(self.level) and statistics.fmean(self.level) >= self.useful

    def _fallen(self) -> bool:
        level, now = statistics.fmean(self.level), statistics.fmean(self.lately)
        error = statistics.stdev(self.level) * math.sqrt(1 / _LEVEL + 1 / _LATELY)
        return level - now > max(_STALE * level, _SURE * error)

    def gained(self, in_use: float, candidate: float, seconds: float) -> None:
        """A stretch of training was judged: both accept lengths on the same harvest, and the seconds it took since the
        judgement before. A candidate that is not finite gained nothing."""
        gain = candidate / in_use - 1
        self.gains.append((gain if math.isfinite(gain) else 0.0, seconds))
        if len(self.gains) == _TRIES and self._is_useful() and self._gains_nothing():
            self.resting = True

    def _gains_nothing(self) -> bool:
        """For sure: gains on a few held-back prompts are large and of both signs."""
        gains = [gain for gain, _ in self.gains]
        return statistics.fmean(gains) + statistics.stdev(gains) / math.sqrt(_TRIES) < _LEAST

    def should_train(self) -> bool:
        """Whether idle time is to be trained in: not by a drafter that no longer gains, but again by one that went
        stale."""
        return not self.resting

    @property
    def is_known(self) -> bool:
        """Whether the slope of its gains is."""
        return len(self.gains) == _TRIES

    def saves(self, seconds: float, rollout_seconds: float) -> float:
        """Seconds that so much training is predicted to save in the rollouts to come, each of so many seconds: as
        accept length grows, they shrink. 0 as long as the slope is not measured."""
        if self.resting or len(self.gains) < _TRIES:
            return 0.0
        gain, spent = (sum(column) for column in zip(*self.gains, strict=True))
        return max(0.0, gain / max(spent, 1e-9)) * seconds * rollout_seconds * _HORIZON

    def pays_back(self, rollout_seconds: float) -> bool:
        """Whether a second of training that is *not* idle time saves more than that. Until the slope is measured, it
        is tried."""
        if len(self.gains) < _TRIES:
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
