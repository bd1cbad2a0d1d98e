"""The tuner that measures what strategies give, and uses the fastest, which may be plain decoding.

It is BEG-MAB of the TLT paper (arXiv 2511.16665, section 5: bucketed epsilon-greedy over the window of what
each arm gave) with a model for arms that were not tried. The seconds of a round depend on the bucket (live rows and
context), the tokens that it commits on the text, so both are learned separately: how far a drafter's guesses are right
from all of its arms, wherever they are used; an arm's seconds from a profile taken at start-up, scaled by what the
bucket's other arms took, and then from its own rounds.
No torch here: `bench/tuner.py` runs it against recorded tables.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tlt.draft.horizon import RoundCosts
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.acceptance import AcceptanceModel, chance
from tlt.engine.buckets import Bucket, Took, bucket_of
from tlt.engine.interpolate import interpolate
from tlt.engine.tuner import RoundResult

_ROUNDS_BETWEEN_LOOKS = 4  # all arms are compared once in so many rounds; an arm is tried for so many
_TRY_SHARE = 0.1  # fraction of the comparisons at which an arm that could be the best is tried
_RETRY_UNUSED_AFTER_ROUNDS = 512  # a drafter that was not used for so many rounds is tried again
_AGREEMENT_AT_BEST = 0.8  # how often the guesses of an unknown drafter may be right at best
_AGREEMENT_UNKNOWN = 0.4  # how often the guesses of an unknown drafter are expected to be right
_DOUBT_OF_SECONDS = 0.1  # relative error of an arm's seconds in a new bucket; falls with the root of its rounds there
_DOUBT_OF_ACCEPTANCE = 0.3  # relative error of how often guesses are right; falls with the root of the rows seen
_PRIOR_ROUNDS = 4  # weight of the model's values: in rounds for seconds, in rows for guesses
_PRIOR_ROWS = 2  # weight, in rows, of the guess before as a prior; and of chains as a prior for trees
_RENEWED_IF_BETTER_BY = 0.1  # what was seen of a drafter is forgotten if its successor's agreement is higher by this
_ROWS_OF_PREDECESSOR = 8.0  # weight, in rows, of what was seen of a drafter, for its successor
_FREE_ROWS_SLOWDOWN = 0.03  # a round may take longer by this fraction for rows that nobody waits for
_BRIEF_ROUND_SLOWDOWN = 1.8  # a round that is to be over soon may take so many times the round of one row
_SWITCH_MARGIN = 0.02  # an arm gives way only to one that is faster by this fraction
_KEPT_OF_SPENT = 0.8  # of the seconds spent in rounds, from one rollout to the next
_LOOK_AHEAD = ("ahead", 1)  # the source of look-ahead chains
_AGREEMENT_AHEAD = 0.97  # how often a look-ahead's tokens are expected to be right before any was seen


class Bandit:
    """`profile[rows][strategy]`: seconds of a round, measured at start-up; numbers of rows in between are interpolated.
    `chances[drafter]`: how often its guesses are right, as far as that is known at the start."""

    def __init__(
        self,
        strategies: Iterable[Strategy],
        profile: Mapping[int, Mapping[Strategy, float]],
        chances: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.chances = dict(chances or {})
        self.strategies = tuple(strategies)
        self._known = frozenset(self.strategies)
        self._arms = tuple(strategy for strategy in self.strategies if not strategy.ahead)
        self._widths = sorted({strategy.ahead for strategy in self.strategies} - {0})
        self.profile = {rows: dict(profile[rows]) for rows in sorted(profile)}
        self.rng = random.Random(seed)
        self.took: dict[Bucket, dict[Strategy, Took]] = {}
        self.anywhere, self.here = AcceptanceModel(), dict[Bucket, AcceptanceModel]()
        self._interpolated: dict[tuple[Strategy, int], float] = {}
        self._within: dict[tuple[int, float], int] = {}  # rows of a round that takes so many times longer
        self._scale: dict[Bucket, float] = {}  # measured seconds over those of the profile
        self.current = self.settled = PLAIN  # the arm in use, and the arm that is held to be the best
        self._last = PLAIN  # strategy of the round before
        self.switched = False
        self.catch_up: dict[str, float] = {}  # extra seconds of a drafter's first round after another drafter's
        self.stay = 50.0  # number of rounds for which the best arm stays the best, on average
        self._rounds = self._turned = 0
        self._used: dict[str, int] = {}  # round in which a drafter was last used
        self._spent: dict[Bucket, float] = {}  # seconds spent in rounds of the last rollouts
        self._now = Bucket(0, 0)
        self._each = 1.0  # tokens that a row commits in a round with `current`
        self._ahead = self._expected_ahead(self._now)  # and in one with a look-ahead chain of 0, 1, 2, ... tokens

    # -- the choice ----------------------------------------------------------------------------------------------------

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        bucket = bucket_of(rows, context)
        moved = bucket != self._now
        self._now = bucket
        self._rounds += 1
        # comparing all arms in every round would cost more than it gains
        lost = self.current != PLAIN and self.current.drafter not in usable
        if moved or lost or self._rounds % _ROUNDS_BETWEEN_LOOKS == 0:
            self.current = self._pick(bucket, [a for a in self._arms if a == PLAIN or a.drafter in usable])
            self._each, self._ahead = self.tokens(self.current, bucket), self._expected_ahead(bucket)
        chosen = self._beside_ahead(self.current, bucket, offers) if any(offers) and self._widths else self.current
        self.switched, self._last = chosen.drafter != self._last.drafter, chosen
        return chosen

    def _beside_ahead(self, arm: Strategy, bucket: Bucket, offers: Sequence[int]) -> Strategy:
        """Decide how many look-ahead tokens a row may have in the pass, and whether the arm drafts for the other rows.
        This is decided every round, as other rows have a look-ahead each time."""
        known = np.array(offers)
        others = len(known) - np.count_nonzero(known)
        widths = [w for w in self._widths if w <= known.max()]
        widths += [w for w in self._widths if w > known.max()][:1]
        best, most = arm, len(known) * self._each / self._seconds_now(arm, bucket)
        for width in widths:
            by_ahead = self._ahead[np.minimum(known[known > 0], width)].sum()
            for base, each in {PLAIN: 1.0, arm: self._each}.items() if others else [(PLAIN, 1.0)]:
                speed = (by_ahead + others * each) / self._seconds_ahead(base, width, int(known.max()), bucket)
                if speed > most:
                    best, most = base._replace(ahead=width), speed
        return best

    def _seconds_ahead(self, base: Strategy, width: int, longest: int, bucket: Bucket) -> float:
        """Seconds of a round with this width, interpolated to the next lower one if the longest chain is shorter."""
        seconds = self._seconds_now(base._replace(ahead=width), bucket)
        if longest >= width:
            return seconds
        below = max((w for w in self._widths if w < width), default=0)
        return interpolate({below: self._seconds_now(base._replace(ahead=below), bucket), width: seconds}, longest)

    def _seconds_now(self, arm: Strategy, bucket: Bucket) -> float:
        """Seconds of the arm, with its drafter's catch-up per round if the round before did not use that drafter."""
        catching_up = self.catch_up.get(arm.drafter, 0.0) if arm.drafter != self._last.drafter else 0.0
        return self.seconds(arm, bucket) + catching_up / _ROUNDS_BETWEEN_LOOKS

    def _expected_ahead(self, bucket: Bucket) -> np.ndarray:
        here, depth, right = self.here.get(bucket) or AcceptanceModel(), max(self._widths, default=0), _AGREEMENT_AHEAD
        reached = [1.0]
        for all_over, nearby in zip(*(g.levels(_LOOK_AHEAD, depth) for g in (self.anywhere, here)), strict=True):
            right = chance(all_over, right, _PRIOR_ROUNDS)
            reached.append(reached[-1] * chance(nearby, right, _PRIOR_ROUNDS))
        return np.cumsum(reached)

    def _pick(self, bucket: Bucket, arms: Sequence[Strategy]) -> Strategy:
        speed = {arm: self.tokens(arm, bucket) / self.seconds(arm, bucket) for arm in arms}
        best = max(arms, key=lambda arm: speed[arm])
        margin = _SWITCH_MARGIN + self._catching_up(best, bucket, self.stay)
        if self.settled in speed and speed[best] < speed[self.settled] * (1 + margin):
            best = self.settled
        self._settle(best)
        # an arm is worth a try if, by what is not known of it, it could be the best with its catch-up counted
        hopeful = [
            arm
            for arm in arms
            if arm != best
            and speed[arm] * (1 + self._doubt(arm, bucket)) > speed[best] * (1 + self._price(arm, bucket))
        ]
        unknown = [a for a in hopeful if self._is_unknown(a.drafter)]
        if unknown:
            found = max(unknown, key=lambda arm: speed[arm])
            self._forget(found.drafter)
            return found
        return self.rng.choice(hopeful) if hopeful and self.rng.random() < _TRY_SHARE else best

    def _catching_up(self, arm: Strategy, bucket: Bucket, rounds: float) -> float:
        """What a switch to the arm's drafter costs, as a fraction of the seconds of so many rounds."""
        if arm.drafter == self.settled.drafter:
            return 0.0
        return self.catch_up.get(arm.drafter, 0.0) / (rounds * self.seconds(arm, bucket))

    def _price(self, arm: Strategy, bucket: Bucket) -> float:
        """What a try costs: the catch-up, paid over the rounds of one try; or, if the drafter is unknown, over the
        rounds until it would be tried again."""
        unknown = self._is_unknown(arm.drafter)
        return self._catching_up(arm, bucket, _RETRY_UNUSED_AFTER_ROUNDS if unknown else _ROUNDS_BETWEEN_LOOKS)

    def _is_unknown(self, drafter: str) -> bool:
        """Whether the drafter was never used, or so long ago that nothing is known of its guesses any more."""
        last = self._used.get(drafter)
        return drafter != PLAIN.drafter and (last is None or self._rounds - last >= _RETRY_UNUSED_AFTER_ROUNDS)

    def _settle(self, best: Strategy) -> None:
        if best != self.settled:
            self.stay += 0.2 * (self._rounds - self._turned - self.stay)
            self._turned, self.settled = self._rounds, best

    def _doubt(self, arm: Strategy, bucket: Bucket) -> float:
        """By what fraction an arm may be faster than is known."""
        if self._is_unknown(arm.drafter):
            return max(0.0, _tokens_of(_AGREEMENT_AT_BEST, arm.depth) / self.tokens(arm, bucket) - 1)
        took = self.took.get(bucket, {}).get(arm)
        return self._expected(arm, bucket)[1] + _DOUBT_OF_SECONDS / math.sqrt(1 + (len(took.seconds) if took else 0))

    # -- what is known -------------------------------------------------------------------------------------------------

    def tokens(self, arm: Strategy, bucket: Bucket) -> float:
        """Expected number of tokens that a row commits in a round."""
        return self._expected(arm, bucket)[0]

    def _expected(self, arm: Strategy, bucket: Bucket) -> tuple[float, float]:
        """Expected number of tokens that a row commits, and the relative error of that."""
        here = self.here.get(bucket) or AcceptanceModel()
        source, chain = (arm.drafter, arm.branching), (arm.drafter, 1)
        right, reached, tokens, luck = self.chances.get(arm.drafter, _AGREEMENT_UNKNOWN), 1.0, 1.0, 0.0
        seen = (self.anywhere.levels(chain, arm.depth), self.anywhere.levels(source, arm.depth))
        for of_chains, of_source, nearby in zip(*seen, here.levels(source, arm.depth), strict=True):
            right = chance(of_chains, right, _PRIOR_ROWS)
            tree = chance(of_source, right, _PRIOR_ROWS) if source != chain else right
            reached *= chance(nearby, tree, _PRIOR_ROUNDS)
            tokens += reached
            luck += reached / math.sqrt(1 + of_source[0])
        return tokens, _DOUBT_OF_ACCEPTANCE * luck / tokens

    def seconds(self, arm: Strategy, bucket: Bucket) -> float:
        """Expected seconds of a round in this bucket."""
        expected = self._profiled(arm, 2**bucket.rows) * self._scale.get(bucket, 1.0)
        took = self.took.get(bucket, {}).get(arm)
        if took is None or (arm.ahead and len(took.seconds) < _PRIOR_ROUNDS):
            return expected  # widths are not tried at random, so one slow round could rule one out
        return _blend(len(took.seconds), took.median, expected)

    def _profiled(self, arm: Strategy, rows: int) -> float:
        known = self._interpolated.get((arm, rows))
        if known is None:
            costs = {profiled: seconds[arm] for profiled, seconds in self.profile.items()}
            known = self._interpolated[arm, rows] = interpolate(costs, rows)
        return known

    # -- what a round taught -------------------------------------------------------------------------------------------

    def rollout_begins(self) -> None:
        self._spent = {bucket: _KEPT_OF_SPENT * seconds for bucket, seconds in self._spent.items()}

    def record(self, result: RoundResult) -> None:
        strategy, seconds, tokens, scored, ahead, own = result
        bucket = self._now
        if own:
            self._spent[bucket] = self._spent.get(bucket, 0.0) + seconds
        if strategy not in self._known:
            return
        ahead = ahead or [0] * len(tokens)
        drafted = [count for count, guessed in zip(tokens, ahead, strict=True) if not guessed]
        if scored and self.switched and strategy.drafter != PLAIN.drafter:  # the catch-up is charged to the switch
            excess = max(0.0, seconds - self.seconds(strategy, bucket))
            known = self.catch_up.get(strategy.drafter, excess)
            self.catch_up[strategy.drafter] = known + 0.2 * (excess - known)
        elif scored and (not any(ahead) or max(ahead) >= strategy.ahead):  # narrower passes do not count
            self._learn_seconds(bucket, strategy, [seconds])
        for guesses in (self.anywhere, self.here.setdefault(bucket, AcceptanceModel())):
            if strategy.drafter != PLAIN.drafter and drafted:
                guesses.add((strategy.drafter, strategy.branching), [strategy.depth] * len(drafted), drafted)
            if any(ahead):
                levels, right = zip(*((n, count) for n, count in zip(ahead, tokens, strict=True) if n), strict=True)
                guesses.add(_LOOK_AHEAD, levels, right)
        if strategy.drafter != PLAIN.drafter and drafted:
            self._used[strategy.drafter] = self._rounds

    def _learn_seconds(self, bucket: Bucket, arm: Strategy, seconds: Iterable[float]) -> None:
        here = self.took.setdefault(bucket, {})
        here.setdefault(arm, Took()).add(seconds)
        rows = 2**bucket.rows
        self._scale[bucket] = statistics.median(took.median / self._profiled(a, rows) for a, took in here.items())

    def free_rows(self, rows: int) -> int:
        """Taken from the profile: many on a GPU, hardly any on a CPU."""
        return self._rows_within(rows, 1 + _FREE_ROWS_SLOWDOWN)

    def brief_rows(self) -> int:
        """Taken from the profile: a full batch on a GPU."""
        return self._rows_within(1, _BRIEF_ROUND_SLOWDOWN)

    def _rows_within(self, rows: int, longer: float) -> int:
        if (rows, longer) not in self._within:
            more = range(rows, max(rows, *self.profile) + 1)
            most = longer * min(self._profiled(PLAIN, n) for n in more)  # the first timing may be too slow
            self._within[rows, longer] = max([rows, *(n for n in more if self._profiled(PLAIN, n) <= most)])
        return self._within[rows, longer]

    def costs(self, drafter: str) -> list[RoundCosts]:
        chains = [arm for arm in self._arms if arm.drafter == drafter and arm.branching == 1]
        others = [arm for arm in self._arms if arm.drafter in self._used and arm.drafter != drafter]

        def found(bucket: Bucket, spent: float) -> RoundCosts:
            plain, drafted = self.seconds(PLAIN, bucket), {arm.depth: self.seconds(arm, bucket) for arm in chains}
            faster = [self.tokens(arm, bucket) * plain / self.seconds(arm, bucket) for arm in others]
            return RoundCosts(spent, plain, drafted, max([1.0, *faster]))

        return [found(bucket, spent) for bucket, spent in self._spent.items() if chains]

    def renew(self, drafter: str, chance: float | None) -> None:
        """Forget what was seen of the old drafter's guesses if the new one is much better, or unknown; else a little of
        it counts until more is seen. Small differences say little, as `chance` was measured on other prompts. What was
        seen in a bucket is forgotten in any case: where the old one was no use, nothing else would be seen any more."""
        first = self.anywhere.chance((drafter, 1), 0, self.chances.get(drafter, _AGREEMENT_UNKNOWN), _PRIOR_ROWS)
        much_better = chance is None or chance > first + _RENEWED_IF_BETTER_BY
        self._forget(drafter, 0.0 if much_better else _ROWS_OF_PREDECESSOR)
        if chance is not None:
            self.chances[drafter] = chance

    def _forget(self, drafter: str, rows: float = 0.0) -> None:
        """Forget how often the drafter's guesses were right, but not the seconds of its rounds. What was seen over all
        buckets counts as so many rows from now on."""
        self.anywhere.fade(drafter, rows)
        for guesses in self.here.values():
            guesses.fade(drafter, 0.0)

    # -- the checkpoint's part -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "took": [
                [list(bucket), list(arm), list(took.seconds)]
                for bucket, arms in self.took.items()
                for arm, took in arms.items()
            ],
            "anywhere": self.anywhere.state(),
            "here": [[list(bucket), guesses.state()] for bucket, guesses in self.here.items()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        for bucket, arm, seconds in state.get("took", ()):
            if (key := Strategy(*arm)) in self._known:
                self._learn_seconds(Bucket(*bucket), key, seconds)
        drafters = {arm.drafter for arm in self.strategies} | {_LOOK_AHEAD[0]}
        self.anywhere.load_state(state.get("anywhere", ()), drafters)
        self._used |= {drafter: self._rounds for drafter, _ in self.anywhere.seen if drafter != _LOOK_AHEAD[0]}
        for bucket, guesses in state.get("here", ()):
            self.here.setdefault(Bucket(*bucket), AcceptanceModel()).load_state(guesses, drafters)


def _blend(count: int, seen: float, prior: float) -> float:
    """The mean of what `count` rounds took and of the prior, which counts as a few rounds."""
    return (count * seen + _PRIOR_ROUNDS * prior) / (count + _PRIOR_ROUNDS)


def _tokens_of(chance: float, depth: int) -> float:
    return sum(chance**k for k in range(depth + 1))
