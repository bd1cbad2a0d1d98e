"""The tuner that measures strategies and uses the fastest, which may be plain decoding.

The number of tokens that a round commits is learned from all rounds of a drafter (`AcceptanceModel`). The seconds of a
round depend on the bucket (active rows and context). They come from a profile that is taken before the first rollout,
then from the rounds themselves. Both estimates are ranges. The strategy that could be the fastest is tried if its loss
is affordable even if no draft token is accepted: all losses against plain decoding together stay below a small share of
the time. Otherwise the strategy is used that is fastest even at the lower end of its range. (The TLT paper, arXiv
2511.16665, section 5, has an epsilon-greedy bandit here, which tries strategies at any cost.)

No torch here: `bench/tuner.py` runs it with recorded tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.acceptance import AcceptanceModel, chance
from tlt.engine.buckets import Bucket, Took, bucket_of
from tlt.engine.interpolate import interpolate
from tlt.engine.tuner import RoundResult

_ROUNDS_BETWEEN_LOOKS = 4  # rounds between two comparisons of all arms
_LOST = 0.01  # share of the seconds spent that tries may lose against plain decoding
_MEMORY = 1 - 1 / 512  # weight of seconds spent and lost, from one round to the next
_ACCEPTANCE = 0.4  # acceptance rate of an unknown drafter
_HOPED_ACCEPTANCE = 0.8  # upper limit of the optimistic rate, which is twice the known one
_DOUBT_OF_SECONDS = 0.1  # relative error of an arm's seconds that were not measured in the bucket
_PRIOR_ROUNDS = 4  # weight, in rounds, of the seconds that the profile gives
_PRIOR_ROWS = 2  # weight, in rows, of the acceptance rate before any was seen; and of chains as a prior for trees
_ROWS_OF_JUDGEMENT = 8  # weight, in rows, of the acceptance rate that a new drafter had on held-out data
_FREE_ROWS_SLOWDOWN = 0.03  # fraction by which rows of coming steps may lengthen a round
_BRIEF_ROUND_SLOWDOWN = 1.8  # longest duration of a short round, relative to a round of one row
_MARGIN = 0.02  # fraction by which another arm must be faster to replace the present one
_LOOK_AHEAD = ("ahead", 1)  # the source of look-ahead chains
_AGREEMENT_AHEAD = 0.97  # acceptance rate of look-ahead tokens before any was seen


class Bandit:
    """Tuner with a start-up profile. `measure()` returns the profile, rows -> strategy -> seconds of a round, and is
    called before the first rollout. Other numbers of rows are interpolated. `chances[drafter]`: acceptance rate, if it
    is known at the start; a drafter with 0 is not used."""

    def __init__(
        self,
        strategies: Iterable[Strategy],
        measure: Callable[[], Mapping[int, Mapping[Strategy, float]]],
        chances: Mapping[str, float] | None = None,
    ) -> None:
        self.chances = dict(chances or {})
        self.strategies = tuple(strategies)
        self._known = frozenset(self.strategies)
        self._arms = tuple(strategy for strategy in self.strategies if not strategy.ahead)
        self._widths = sorted({strategy.ahead for strategy in self.strategies} - {0})
        self._measure = measure
        self.took: dict[Bucket, dict[Strategy, Took]] = {}
        self.seen, self.seen_ahead = AcceptanceModel(), AcceptanceModel()  # of draft tokens, of look-ahead tokens
        self._interpolated: dict[tuple[Strategy, int], float] = {}
        self._within: dict[tuple[int, float], int] = {}  # (rows, factor) -> rows within this slowdown
        self.current = PLAIN
        self._last = PLAIN  # strategy of the round before
        self.switched = False
        self.catch_up: dict[str, float] = {}  # extra seconds of a drafter's first round after another drafter's
        self._rounds = 0
        self.spent = self.lost = 0.0  # seconds of the last rounds, and seconds that plain decoding would have saved
        self._now = Bucket(0, 0)
        self._each = 1.0  # tokens per row in a round with `current`
        self._ahead = self._expected_ahead()  # the same with a look-ahead chain of 0, 1, 2, ... tokens

    @cached_property
    def profile(self) -> dict[int, dict[Strategy, float]]:
        profile = self._measure()
        return {rows: dict(profile[rows]) for rows in sorted(profile)}

    # -- the choice ----------------------------------------------------------------------------------------------------

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        bucket = bucket_of(rows, context)
        moved = bucket != self._now
        self._now = bucket
        self._rounds += 1
        is_plain_known = self._times(PLAIN, bucket) >= _PRIOR_ROUNDS
        if not is_plain_known:  # losses are measured against plain decoding
            self.current = arm = PLAIN
        elif moved or self._is_due(usable):
            arm = self._compare(bucket, [a for a in self._arms if a == PLAIN or self._is_usable(a, usable)])
        else:
            arm = self.current
        looks_ahead = any(offers) and self._widths and is_plain_known
        chosen = self._beside_ahead(arm, bucket, offers) if looks_ahead else arm
        self.switched, self._last = chosen.drafter != self._last.drafter, chosen
        return chosen

    def _is_due(self, usable: Collection[str]) -> bool:
        """Return whether to compare all arms. A comparison in every round would cost more than it gains."""
        gone = self.current != PLAIN and self.current.drafter not in usable
        return gone or self._last != self.current or self._rounds % _ROUNDS_BETWEEN_LOOKS == 0

    def _is_usable(self, arm: Strategy, usable: Collection[str]) -> bool:
        """Return whether the arm's drafter works, and was trained if it is a learned one."""
        return arm.drafter in usable and self.chances.get(arm.drafter) != 0.0

    def _compare(self, bucket: Bucket, arms: Sequence[Strategy]) -> Strategy:
        """Set `current` to the arm that is the fastest at the known acceptance rate. Return the arm for this round: the
        one that could be the fastest, among those whose loss is affordable."""
        plain = self.seconds(PLAIN, bucket)
        best = self._fastest(arms, lambda arm: self.tokens(arm) / self._seconds_now(arm, bucket))
        pays = self.seconds(best, bucket, -_DOUBT_OF_SECONDS) < self.tokens(best) * plain
        self.current = best if pays else PLAIN
        self._each, self._ahead = self.tokens(self.current), self._expected_ahead()
        most = max(0.0, _LOST * self.spent - self.lost)
        affordable = [self.current, *(arm for arm in arms if self._loss(arm, bucket) <= most)]
        return self._fastest(
            affordable, lambda arm: self._hoped_tokens(arm) / self.seconds(arm, bucket, _DOUBT_OF_SECONDS)
        )

    def _loss(self, arm: Strategy, bucket: Bucket) -> float:
        """Return the seconds by which a round takes longer than plain decoding of the same tokens, at the known
        acceptance rate."""
        seconds = self.seconds(arm, bucket) + self._catching_up(arm)
        return seconds - self.tokens(arm) * self.seconds(PLAIN, bucket)

    def _fastest(self, arms: Sequence[Strategy], speed: Callable[[Strategy], float]) -> Strategy:
        """Return the fastest arm. If it is hardly faster than plain decoding or than the arm in use, return that
        one."""
        best = max(arms, key=speed)
        as_good = (arm for arm in (PLAIN, self.current) if arm in arms and speed(best) < (1 + _MARGIN) * speed(arm))
        return next(as_good, best)

    def _beside_ahead(self, arm: Strategy, bucket: Bucket, offers: Sequence[int]) -> Strategy:
        """Return the strategy with a limit of look-ahead tokens per row, and with or without the arm for the other
        rows. This is decided every round, because other rows have look-ahead drafts each time."""
        known = np.array(offers)
        others = len(known) - np.count_nonzero(known)
        widths = [w for w in self._widths if w <= known.max()]
        widths += [w for w in self._widths if w > known.max()][:1]
        widths = widths if self.seen_ahead.seen else widths[:1]  # a wide pass is expensive if nothing is accepted
        each_of_arm = self._each if arm == self.current else self._hoped_tokens(arm)
        best, most = arm, (1 + _MARGIN) * len(known) * each_of_arm / self._seconds_now(arm, bucket)
        for width in widths:
            by_ahead = self._ahead[np.minimum(known[known > 0], width)].sum()
            for base, each in {PLAIN: 1.0, arm: each_of_arm}.items() if others else [(PLAIN, 1.0)]:
                speed = (by_ahead + others * each) / self._seconds_ahead(base, width, int(known.max()), bucket)
                if speed > most:
                    best, most = base._replace(ahead=width), speed
        return best

    def _seconds_ahead(self, base: Strategy, width: int, longest: int, bucket: Bucket) -> float:
        """Return the seconds of a round with this width, interpolated to the next lower one if the longest chain is
        shorter."""
        seconds = self._seconds_now(base._replace(ahead=width), bucket)
        if longest >= width:
            return seconds
        below = max((w for w in self._widths if w < width), default=0)
        return interpolate({below: self._seconds_now(base._replace(ahead=below), bucket), width: seconds}, longest)

    def _seconds_now(self, arm: Strategy, bucket: Bucket) -> float:
        """Return the seconds of the arm, with its drafter's catch-up per round if the last round did not use that
        drafter."""
        return self.seconds(arm, bucket) + self._catching_up(arm) / _ROUNDS_BETWEEN_LOOKS

    def _catching_up(self, arm: Strategy) -> float:
        return self.catch_up.get(arm.drafter, 0.0) if arm.drafter != self._last.drafter else 0.0

    def _expected_ahead(self) -> np.ndarray:
        right, reached = _AGREEMENT_AHEAD, [1.0]
        for level in self.seen_ahead.levels(_LOOK_AHEAD, max(self._widths, default=0)):
            right = chance(level, right, _PRIOR_ROWS)
            reached.append(reached[-1] * right)
        return np.cumsum(reached)

    # -- estimates -----------------------------------------------------------------------------------------------------

    def tokens(self, arm: Strategy) -> float:
        """Return the tokens per row in a round, if unseen draft tokens are not accepted."""
        return self._tokens(arm, 0.0)

    def _hoped_tokens(self, arm: Strategy) -> float:
        known = self.chances.get(arm.drafter, _ACCEPTANCE)
        return self._tokens(arm, max(known, min(_HOPED_ACCEPTANCE, 2 * known)))

    def _tokens(self, arm: Strategy, right: float) -> float:
        """Return the tokens per row in a round. `right`: acceptance rate before any was seen."""
        source, chain, reached, tokens = (arm.drafter, arm.branching), (arm.drafter, 1), 1.0, 1.0
        seen = (self.seen.levels(chain, arm.depth), self.seen.levels(source, arm.depth))
        for of_chains, of_source in zip(*seen, strict=True):
            in_chains = chance(of_chains, right, _PRIOR_ROWS)
            # a tree is accepted at least as often as a chain
            reached *= chance(of_source, max(in_chains, right), _PRIOR_ROWS) if source != chain else in_chains
            tokens += reached
        return tokens

    def seconds(self, arm: Strategy, bucket: Bucket, doubt: float = 0.0) -> float:
        """Return the expected seconds of a round in this bucket. `doubt`: relative error of what was not measured
        there."""
        expected = self._profiled(arm, 2**bucket.rows) * self._scale_of(bucket) * (1 - doubt)
        took = self.took.get(bucket, {}).get(arm)
        if took is None or (arm.ahead and len(took.seconds) < _PRIOR_ROUNDS):
            return expected  # widths are not tried, so one slow round could rule one out
        return _blend(len(took.seconds), took.median, expected)

    def _scale_of(self, bucket: Bucket) -> float:
        """Return the ratio of measured to profiled seconds of plain rounds in the bucket."""
        took = self.took.get(bucket, {}).get(PLAIN)
        return took.median / self._profiled(PLAIN, 2**bucket.rows) if took else 1.0

    def _times(self, arm: Strategy, bucket: Bucket) -> int:
        """Return the number of timed rounds of the arm in the bucket."""
        took = self.took.get(bucket, {}).get(arm)
        return len(took.seconds) if took else 0

    def _profiled(self, arm: Strategy, rows: int) -> float:
        known = self._interpolated.get((arm, rows))
        if known is None:
            costs = {profiled: seconds[arm] for profiled, seconds in self.profile.items()}
            known = self._interpolated[arm, rows] = interpolate(costs, rows)
        return known

    # -- learning from rounds ------------------------------------------------------------------------------------------

    def rollout_begins(self) -> None:
        _ = self.profile  # measured now, because no round is under way

    def record(self, result: RoundResult) -> None:
        strategy, seconds, tokens, scored, ahead = result
        bucket = self._now
        if strategy not in self._known:
            return
        ahead = ahead or [0] * len(tokens)
        drafted = [count for count, guessed in zip(tokens, ahead, strict=True) if not guessed]
        if scored and self.switched and strategy.drafter != PLAIN.drafter:  # the catch-up is charged to the switch
            excess = max(0.0, seconds - self.seconds(strategy, bucket) * self._share(strategy, len(tokens)))
            known = self.catch_up.get(strategy.drafter, excess)
            self.catch_up[strategy.drafter] = known + 0.2 * (excess - known)
        elif scored and (not any(ahead) or max(ahead) >= strategy.ahead):  # narrower passes do not count
            self._learn_seconds(bucket, strategy, [seconds / self._share(strategy, len(tokens))])
        if scored:
            tries = strategy.drafter != PLAIN.drafter and not any(ahead)
            plain = self.seconds(PLAIN, bucket) * self._share(PLAIN, len(tokens))
            lost = seconds - plain * statistics.fmean(tokens) if tries else 0.0
            self.spent, self.lost = _MEMORY * self.spent + seconds, _MEMORY * self.lost + lost
        self.seen.age()
        if strategy.drafter != PLAIN.drafter and drafted:
            self.seen.add((strategy.drafter, strategy.branching), [strategy.depth] * len(drafted), drafted)
        if any(ahead):
            levels, right = zip(*((n, count) for n, count in zip(ahead, tokens, strict=True) if n), strict=True)
            self.seen_ahead.age()
            self.seen_ahead.add(_LOOK_AHEAD, levels, right)

    def _share(self, arm: Strategy, rows: int) -> float:
        """Return the seconds of a round of this many rows, relative to the largest number of rows in the bucket."""
        return self._profiled(arm, rows) / self._profiled(arm, 2**self._now.rows)

    def _learn_seconds(self, bucket: Bucket, arm: Strategy, seconds: Iterable[float]) -> None:
        self.took.setdefault(bucket, {}).setdefault(arm, Took()).add(seconds)

    def free_rows(self, rows: int) -> int:
        """Return the number from the profile: many on a GPU, hardly more on a CPU."""
        return self._rows_within(rows, 1 + _FREE_ROWS_SLOWDOWN)

    def brief_rows(self) -> int:
        """Return the number from the profile: a full batch on a GPU."""
        return self._rows_within(1, _BRIEF_ROUND_SLOWDOWN)

    def _rows_within(self, rows: int, longer: float) -> int:
        if (rows, longer) not in self._within:
            more = range(rows, max(rows, *self.profile) + 1)
            most = longer * min(self._profiled(PLAIN, n) for n in more)  # the first timing may be too slow
            self._within[rows, longer] = max([rows, *(n for n in more if self._profiled(PLAIN, n) <= most)])
        return self._within[rows, longer]

    def plain_seconds(self, rows: int, context: float) -> float:
        """Return the expected seconds, from the start-up profile and the timed rounds."""
        bucket = bucket_of(rows, context)
        return self.seconds(PLAIN, bucket) * self._profiled(PLAIN, rows) / self._profiled(PLAIN, 2**bucket.rows)

    def renew(self, drafter: str, chance: float | None) -> None:
        """Forget the counts of the old drafter. The acceptance rate of the new one counts like a few rows."""
        self.seen.forget(drafter)
        self.chances.pop(drafter, None)
        if chance is not None:
            self.chances[drafter] = chance
            deepest = max((arm.depth for arm in self._arms if arm.drafter == drafter), default=0)
            self.seen.assume((drafter, 1), deepest, chance, _ROWS_OF_JUDGEMENT)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "took": [
                [list(bucket), list(arm), list(took.seconds)]
                for bucket, arms in self.took.items()
                for arm, took in arms.items()
            ],
            "seen": self.seen.state(),
            "seen_ahead": self.seen_ahead.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        for bucket, arm, seconds in state.get("took", ()):
            if (key := Strategy(*arm)) in self._known:
                self._learn_seconds(Bucket(*bucket), key, seconds)
        self.seen.load_state(state.get("seen", ()), {arm.drafter for arm in self.strategies})
        self.seen_ahead.load_state(state.get("seen_ahead", ()), {_LOOK_AHEAD[0]})


def _blend(count: int, seen: float, prior: float) -> float:
    """Return the mean of `count` rounds and of the prior, which counts as a few rounds."""
    return (count * seen + _PRIOR_ROUNDS * prior) / (count + _PRIOR_ROUNDS)
