"""Tuner that measures strategies and uses the fastest, which may be plain decoding. A strategy is called an arm.

Speed is tokens per second. The tokens of a round are predicted from the drafter's acceptance rates (`AcceptanceModel`).
The seconds of a round depend on the bucket (active rows and context length). They come from the start-up profile, then
from the medians of timed rounds. An arm that may be faster than the best one so far is tried if the expected loss of
one round is affordable. All drafts together may lose 1 % of the time against plain decoding. (The TLT paper, arXiv
2511.16665, section 5, has an epsilon-greedy bandit here, which tries strategies at any cost.)

This module does not import torch. So `bench/tuner.py`, outside the package, can simulate the tuner with recorded
rounds.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from tlt.config.registry import DRAFTERS
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.estimates import AcceptanceModel, Bucket, RoundTimes, bucket_of, interpolate
from tlt.engine.tuner import RoundResult

_ENOUGH_ROUNDS = 4  # rounds of plain decoding in a bucket before other arms
_ROUNDS_BETWEEN_COMPARISONS = 4  # rounds between two comparisons of all arms
_MARGIN = 0.02  # fraction by which another arm must be faster to replace the current one
_LOST = 0.01  # share of the time that drafts may lose against plain decoding
_FIRST_ROUNDS = 128  # at the beginning, drafts may lose 1 % of the time of this many plain rounds
_FREE = 1.03  # factor by which look-ahead rows may lengthen a round
_MEMORY = 1 - 1 / 512  # factor on the seconds spent and lost so far, applied at every timed round
_HOPED_ACCEPTANCE = 0.8  # rate assumed for a drafter that was never evaluated, to decide whether to try it
_ACCEPTANCE_AHEAD = 0.97  # assumed acceptance rate of look-ahead tokens before any was verified
_AHEAD = (4, 8, 16, 32, 63)  # limits on look-ahead chains, in tokens; the longest chain sets the width of the pass
_LOOK_AHEAD = "ahead"  # source under which look-ahead tokens are counted


def strategies(drafters: Iterable[str]) -> list[Strategy]:
    """Return plain decoding, and the strategies that the registry lists for these drafters."""
    entries = ((name, DRAFTERS[name]) for name in drafters)
    return [PLAIN, *(Strategy(name, depth, entry.min_chance) for name, entry in entries for depth in entry.depths)]


def with_ahead(arms: Iterable[Strategy]) -> list[Strategy]:
    """Return each arm without look-ahead, and combined with each limit on look-ahead chains."""
    return [arm._replace(ahead=ahead) for arm in arms for ahead in (0, *_AHEAD)]


class Bandit:
    """Tuner that measures strategies and uses the fastest.

    `measure()` is called before the first rollout and returns the start-up profile: rows -> strategy -> seconds of a
    round. For other numbers of rows, the seconds are interpolated. `chances` has the acceptance rate of each drafter
    whose rate is known at the start. A drafter with rate 0 is never the fastest, so it is not used.
    """

    def __init__(
        self,
        strategies: Iterable[Strategy],
        measure: Callable[[], Mapping[int, Mapping[Strategy, float]]],
        chances: Mapping[str, float] | None = None,
    ) -> None:
        self.strategies = tuple(strategies)
        self.chances = dict(chances or {})
        self.times = RoundTimes(measure)
        self.seen, self.seen_ahead = AcceptanceModel(), AcceptanceModel()  # of draft tokens, of look-ahead tokens
        self.current = PLAIN  # the fastest arm
        self.catch_up: dict[str, float] = {}  # extra seconds of each drafter's first round after another drafter
        self.spent = self.lost = 0.0  # seconds of the last rounds, and seconds that plain decoding would have saved
        self._arms = tuple(strategy for strategy in self.strategies if not strategy.ahead)
        self._widths = sorted({strategy.ahead for strategy in self.strategies} - {0})
        self._rounds = 0
        self._now, self._last = Bucket(0, 0), PLAIN  # bucket of this round, strategy of the round before
        self._switched = self._is_try = False  # in this round: whether the drafter changed; whether it is a try
        for drafter, chance in self.chances.items():
            self.seen.assume(drafter, chance)

    # -- the choice ----------------------------------------------------------------------------------------------------

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        bucket = bucket_of(rows, context)
        moved, self._now = bucket != self._now, bucket
        self._rounds += 1
        # plain decoding is timed first, because losses are measured against it
        is_plain_known = self.times.rounds(PLAIN, bucket) >= _ENOUGH_ROUNDS
        arms = [arm for arm in self._arms if arm == PLAIN or arm.drafter in usable]
        arm = self.current
        if not is_plain_known:
            arm = self.current = PLAIN
        elif moved or arm not in arms or self._is_try or self._rounds % _ROUNDS_BETWEEN_COMPARISONS == 0:
            arm = self._compare(arms, bucket)
        self._is_try = arm != self.current
        if any(offers) and self._widths and is_plain_known:
            arm = self._with_ahead(arm, bucket, offers)
        self._switched, self._last = arm.drafter != self._last.drafter, arm
        return arm

    def _compare(self, arms: Sequence[Strategy], bucket: Bucket) -> Strategy:
        """Set `current` to the arm that is the fastest by the acceptance rates so far. Return the arm to try: one that
        may be even faster (`_hoped_tokens`), if the expected loss of one round is affordable. Else return `current`."""
        seconds = {arm: self._seconds_now(arm, bucket) for arm in arms}
        known = {arm: self.tokens(arm) for arm in arms}
        self.current = self._fastest({arm: known[arm] / seconds[arm] for arm in arms})
        plain = seconds[PLAIN]
        # a try may last only one round, so this round is charged the whole catch-up
        most = _LOST * max(self.spent, _FIRST_ROUNDS * plain) - self.lost
        losses = {arm: self._seconds_now(arm, bucket, rounds=1) - known[arm] * plain for arm in arms}
        affordable = [arm for arm in arms if arm == self.current or losses[arm] <= most]
        hoped = {arm: self._hoped_tokens(arm) / seconds[arm] for arm in affordable}
        better = [arm for arm in affordable if hoped[arm] > (1 + _MARGIN) * hoped[self.current]]
        return min(better, key=lambda arm: (self.times.rounds(arm, bucket), -hoped[arm]), default=self.current)

    def _fastest(self, speeds: Mapping[Strategy, float]) -> Strategy:
        """Return the arm with the highest of the `speeds` (tokens per second). If plain decoding is less than 2 %
        slower than this arm, return plain decoding. Else, if the current arm is less than 2 % slower, return the
        current arm."""
        best = max(speeds, key=lambda arm: speeds[arm])
        kept = (arm for arm in (PLAIN, self.current) if arm in speeds and speeds[best] < (1 + _MARGIN) * speeds[arm])
        return next(kept, best)

    def _with_ahead(self, arm: Strategy, bucket: Bucket, offers: Sequence[int]) -> Strategy:
        """Return the faster of two choices: `arm` for all rows, or look-ahead drafts for the rows that have one. In the
        second case, choose the limit on look-ahead tokens per row, and `arm` or plain decoding for the other rows.
        `offers`: number of look-ahead tokens that each row can propose. The choice is made every round, because the
        offers change."""
        known, longest = [offer for offer in offers if offer], max(offers)
        others = len(offers) - len(known)
        widths = [w for w in self._widths if w <= longest] + [w for w in self._widths if w > longest][:1]
        if _LOOK_AHEAD not in self.seen_ahead.seen:
            widths = widths[:1]  # a wide pass is expensive if nothing is accepted
        rates = self.seen_ahead.chances(_LOOK_AHEAD, self._widths[-1], _ACCEPTANCE_AHEAD)
        expected = list(accumulate(accumulate([1.0, *rates], operator.mul)))  # tokens by length of the draft
        tokens = {PLAIN: 1.0, arm: self.tokens(arm)}
        best, most = arm, (1 + _MARGIN) * len(offers) * tokens[arm] / self._seconds_now(arm, bucket)
        for width in widths:
            by_ahead = sum(expected[min(offer, width)] for offer in known)
            for base in tokens if others else [PLAIN]:
                speed = (by_ahead + others * tokens[base]) / self._seconds_ahead(base, width, longest, bucket)
                if speed > most:
                    best, most = base._replace(ahead=width), speed
        return best

    def _seconds_ahead(self, base: Strategy, width: int, longest: int, bucket: Bucket) -> float:
        """Return the expected seconds of a round with at most `width` look-ahead tokens per row, and `base` for the
        other rows. If the longest chain (`longest` tokens) is shorter than `width`, interpolate between `width` and the
        next lower limit."""
        seconds = self._seconds_now(base._replace(ahead=width), bucket)
        if longest >= width:
            return seconds
        below = max((w for w in self._widths if w < width), default=0)
        return interpolate({below: self._seconds_now(base._replace(ahead=below), bucket), width: seconds}, longest)

    # -- estimates -----------------------------------------------------------------------------------------------------

    def tokens(self, arm: Strategy) -> float:
        """Return the expected tokens per row in a round, from the acceptance rates of recent rounds. For a drafter
        without recent rounds, use the rate of its last rounds (`AcceptanceModel.lasting`)."""
        return self._tokens(arm, self.seen.lasting(arm.drafter, self.chances.get(arm.drafter, 0.0)))

    def _hoped_tokens(self, arm: Strategy) -> float:
        """Return the tokens per row that a round may reach. For a drafter without recent rounds, assume the acceptance
        rate of its last evaluation, or 0.8 if it was never evaluated."""
        return self._tokens(arm, self.chances.get(arm.drafter, _HOPED_ACCEPTANCE))

    def _tokens(self, arm: Strategy, prior: float) -> float:
        """Return the expected tokens per row in a round. `prior`: assumed acceptance rate of the first draft token, for
        a drafter without recent rounds."""
        return 1.0 + sum(accumulate(self.seen.chances(arm.drafter, arm.depth, prior), operator.mul))

    def _seconds_now(self, arm: Strategy, bucket: Bucket, rounds: int = _ROUNDS_BETWEEN_COMPARISONS) -> float:
        """Return the mean seconds of the arm's next `rounds` rounds. If the last round used another drafter, the mean
        includes the extra seconds of the change of drafters (`catch_up`)."""
        extra = max(0.0, self.catch_up.get(arm.drafter, 0.0)) if arm.drafter != self._last.drafter else 0.0
        return self.times.seconds(arm, bucket) + extra / rounds

    def free_rows(self, rows: int) -> int:
        """Return the largest number of rows whose plain round takes at most 3 % longer than a round of `rows` rows, by
        the start-up profile. There is one exception: return `rows` if the larger batch would slow the fastest strategy
        by over 3 % in tokens per second of each row. On a GPU this is rare. On a CPU it is common, because drafting
        pays off there with few rows only."""
        most = self.times.most_rows(rows, _FREE)
        free = most == rows or _FREE * self._hoped_speed(most) >= self._hoped_speed(rows)
        return most if free else rows

    def _hoped_speed(self, rows: int) -> float:
        """Return the tokens per second and row of the fastest arm for this number of rows, by `_hoped_tokens`."""
        return max(self._hoped_tokens(arm) / self.times.profiled(arm, rows) for arm in self._arms)

    def brief_rows(self) -> int:
        """Return the largest number of rows for which a plain round takes at most 1.8 times as long as for one row, by
        the start-up profile. On a GPU this is a full batch."""
        return self.times.most_rows(1, 1.8)

    # -- learning from rounds ------------------------------------------------------------------------------------------

    def rollout_begins(self) -> None:
        _ = self.times.profile  # measured now, because no round runs

    def record(self, result: RoundResult) -> None:
        arm, rows, ahead = result.strategy, len(result.tokens), result.ahead or [0] * len(result.tokens)
        if arm not in self.strategies:
            return
        if result.scored:
            self._learn_seconds(arm, result.seconds / self.times.share(arm, rows), max(ahead))
            plain = self.times.seconds(PLAIN, self._now) * self.times.share(PLAIN, rows)
            drafts = arm.drafter != PLAIN.drafter and not any(ahead)
            lost = result.seconds - plain * statistics.fmean(result.tokens) if drafts else 0.0
            self.spent, self.lost = _MEMORY * self.spent + result.seconds, _MEMORY * self.lost + lost
        self.seen.age()
        drafted = [n for n, width in zip(result.tokens, ahead, strict=True) if not width]
        if arm.drafter != PLAIN.drafter and drafted:
            self.seen.add(arm.drafter, [arm.depth] * len(drafted), drafted)
        if any(ahead):
            levels, right = zip(*((a, n) for n, a in zip(result.tokens, ahead, strict=True) if a), strict=True)
            self.seen_ahead.age()
            self.seen_ahead.add(_LOOK_AHEAD, levels, right)

    def _learn_seconds(self, arm: Strategy, seconds: float, width: int) -> None:
        """Update the expected seconds of rounds of `arm` by a measured round. `width`: length in tokens of its longest
        look-ahead draft (0: none). A round with a draft shorter than `arm.ahead` is faster than usual and does not
        count. In the first round after a switch from another drafter, only `catch_up` is updated, by the seconds above
        the expected ones."""
        if self._switched and arm.drafter != PLAIN.drafter:
            excess = seconds - self.times.seconds(arm, self._now)
            known = self.catch_up.get(arm.drafter, excess)
            self.catch_up[arm.drafter] = known + 0.2 * (excess - known)
        elif not width or width >= arm.ahead:
            self.times.add_rounds(self._now, arm, [seconds])

    def renew(self, drafter: str, chance: float | None) -> None:
        """Forget the counts of the replaced drafter. `chance` is the acceptance rate of the new drafter (None:
        unknown). It counts like 8 drafted rows."""
        self.seen.forget(drafter)
        self.chances.pop(drafter, None)
        if chance is not None:
            self.chances[drafter] = chance
            self.seen.assume(drafter, chance)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"took": self.times.state(), "seen": self.seen.state(), "seen_ahead": self.seen_ahead.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.times.load_state(state.get("took", ()), self.strategies)
        self.seen.load_state(state.get("seen", ()), {arm.drafter for arm in self.strategies})
        self.seen_ahead.load_state(state.get("seen_ahead", ()), {_LOOK_AHEAD})
