"""Tuner that uses the strategy that it expects to be the fastest, which may be plain decoding.

Speed is tokens per second. The tokens of a round are predicted from acceptance rates (`AcceptanceRates`), and its
seconds from those of recent rounds (`RoundTimes`). Only rounds of rollouts are timed. A strategy that may be faster
than the current one is tried for a round if the expected loss is affordable: tries may lose 1 % of the time against
plain decoding. (The TLT paper, arXiv 2511.16665, section 5, has an epsilon-greedy bandit here, which tries at any
cost.)

This module does not import torch, so `bench/tuner.py` can simulate the tuner with recorded rounds.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from tlt.config.registry import DRAFTERS
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.tuner import RoundResult

_WINDOW_ROUNDS = 32  # number of recent rounds that an expected time is from
_ENOUGH_ROUNDS = 2  # rounds of plain decoding, for a number of rows, before other strategies
_ROUNDS_BETWEEN_COMPARISONS = 4  # rounds between two comparisons of all strategies
_MARGIN = 0.05  # fraction by which another strategy must be faster to replace the current one; smaller gains are noise
_LOST = 0.01  # share of the time that tries may lose against plain decoding, at the beginning a plain round
_PREPARATION = 0.04  # share of the time so far that the first draft of a drafter may take
_FREE = 1.03  # factor by which look-ahead rows may lengthen a round
_BRIEF = 1.8  # factor by which rows may lengthen the round of one row, while a worker only looks ahead
_FIXED_SHARE = 0.5  # share of the shortest timed pass that is assumed to be independent of the number of tokens
_DRAFT_SHARE = 0.1  # assumed seconds of a draft token, relative to a plain round, for a drafter without timed rounds
_DEEPEST = 64  # depths of a draft whose acceptance is counted
_KEPT = 1 - 1 / 64  # factor on a drafter's counts, applied at every round
_PRIOR_ROWS = 2  # number of rows that an assumed acceptance rate counts as
_ROWS_OF_EVALUATION = 8  # number of rows that a new drafter's rate on held-out data counts as
_HOPED_ACCEPTANCE = 0.8  # rate assumed for a drafter that was never evaluated, to decide whether to try it
_ACCEPTANCE_AHEAD = 0.97  # assumed acceptance rate of look-ahead tokens before any was verified
_AHEAD = (4, 8, 16, 32, 63)  # limits on look-ahead chains, in tokens; the longest chain sets the width of the pass
_LOOK_AHEAD = "ahead"  # source under which look-ahead tokens are counted


def strategies(drafters: Iterable[str]) -> list[Strategy]:
    """Return plain decoding, and the strategies that the registry lists for these drafters."""
    entries = ((name, DRAFTERS[name]) for name in drafters)
    return [PLAIN, *(Strategy(name, depth, entry.min_chance) for name, entry in entries for depth in entry.depths)]


def with_ahead(arms: Iterable[Strategy]) -> list[Strategy]:
    """Return each strategy without look-ahead, and combined with each limit on look-ahead chains."""
    return [arm._replace(ahead=ahead) for arm in arms for ahead in (0, *_AHEAD)]


class RoundTimes:
    """Expected seconds of rounds of the current context class (`context`), from recent rounds.

    The seconds of a pass depend on its number of tokens. They are quartiles of size classes, with lines between them.
    The seconds of a draft are relative to a plain round, so that they hold for any number of rows.
    """

    def __init__(self) -> None:
        self.context = 0
        self.passes: dict[tuple[int, int], deque[tuple[int, float]]] = {}
        """(context class, size class) -> (tokens, seconds) of recent passes"""
        self.drafts: dict[Strategy, deque[tuple[float, float]]] = {}
        """strategy -> (seconds relative to a plain round, tokens per row in the pass) of recent rounds"""
        self._quartiles: dict[int, dict[int, tuple[float, float]]] = {}
        self._points: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # context class -> tokens, ascending, and seconds

    def add_pass(self, tokens: int, seconds: float) -> None:
        size = size_class(tokens)
        passes = self.passes.setdefault((self.context, size), deque(maxlen=_WINDOW_ROUNDS))
        passes.append((tokens, seconds))
        counts, times = zip(*passes, strict=True)
        self._quartiles.setdefault(self.context, {})[size] = statistics.fmean(counts), _undisturbed(times)
        self._points.clear()

    def add_draft(self, arm: Strategy, seconds: float, tokens_per_row: float) -> None:
        self.drafts.setdefault(arm, deque(maxlen=_WINDOW_ROUNDS)).append((seconds, tokens_per_row))

    def num_passes(self, tokens: int) -> int:
        """Return the number of recent passes of about this number of tokens."""
        return len(self.passes.get((self.context, size_class(tokens)), ()))

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers of tokens, ascending, and the seconds of their passes. Sizes that were not timed in
        this context class are from the nearest one, scaled by the sizes that were timed in both."""
        if self.context not in self._points:
            found: dict[int, tuple[float, float]] = {}
            for other in sorted(self._quartiles, key=lambda other: -abs(other - self.context)):
                own = self._quartiles[other]
                scales = [own[size][1] / found[size][1] for size in own if size in found]
                scale = statistics.median(scales) if scales else 1.0
                found = {size: (tokens, seconds * scale) for size, (tokens, seconds) in found.items()} | own
            tokens, seconds = np.array(sorted(found.values())).reshape(-1, 2).T
            self._points[self.context] = tokens, seconds
        return self._points[self.context]

    def pass_seconds(self, tokens: Any, fixed_share: float = _FIXED_SHARE) -> Any:
        """Return the expected seconds of a pass of `tokens` tokens, a number or an array. For passes larger than all
        timed ones, follow the line through the last one and one of at most half its size. `fixed_share`: share of the
        smallest timed pass that an empty pass is assumed to take."""
        sizes, seconds = self.points()
        sizes, seconds = np.append(0.0, sizes), np.append(fixed_share * seconds[0], seconds)
        half = int(np.searchsorted(sizes, sizes[-1] / 2, side="right")) - 1
        slope = max(0.0, (seconds[-1] - seconds[half]) / (sizes[-1] - sizes[half]))
        return np.interp(tokens, sizes, seconds) + slope * np.maximum(0.0, tokens - sizes[-1])

    def draft_cost(self, arm: Strategy) -> tuple[float, float]:
        """Return the expected seconds of a draft, relative to a plain round, and the tokens per row in the pass. If the
        strategy was not timed, scale the costs of the drafter's nearest depth."""
        if arm.drafter == PLAIN.drafter:
            return 0.0, 1.0
        timed = [other for other in self.drafts if other.drafter == arm.drafter]
        if not timed:
            return _DRAFT_SHARE * arm.depth, 1.0 + arm.depth
        near = min(timed, key=lambda other: abs(math.log(other.depth / arm.depth)))
        seconds, tokens = zip(*self.drafts[near], strict=True)
        scale = arm.depth / near.depth
        return scale * _undisturbed(seconds), 1.0 + scale * (statistics.fmean(tokens) - 1.0)

    def round_seconds(self, arm: Strategy, rows: int, fixed_share: float = _FIXED_SHARE) -> float:
        """Return the expected seconds of a round. `fixed_share`: see `pass_seconds`."""
        share, per_row = self.draft_cost(arm)
        whole, plain = self.pass_seconds(np.array([rows * per_row, rows]), fixed_share).tolist()
        return whole + share * plain

    def state(self) -> dict[str, Any]:
        passes = [[context, [list(one) for one in kept]] for (context, _), kept in self.passes.items()]
        drafts = [[list(arm), [list(one) for one in kept]] for arm, kept in self.drafts.items()]
        return {"passes": passes, "drafts": drafts}

    def load_state(self, state: Mapping[str, Any], arms: Collection[Strategy]) -> None:
        """Load the timed rounds that `state` returned, for these strategies only."""
        for self.context, kept in state.get("passes", ()):
            for tokens, seconds in kept:
                self.add_pass(tokens, seconds)
        for arm, kept in state.get("drafts", ()):
            for one in kept if Strategy(*arm) in arms else ():
                self.add_draft(Strategy(*arm), *one)


def _undisturbed(seconds: Sequence[float]) -> float:
    """Return the lower quartile, because disturbances only make a round longer."""
    return sorted(seconds)[len(seconds) // 4]


def context_class(context: float) -> int:
    """Return the class of a mean context length: 0 up to 256 tokens, 1 up to 1024, 2 up to 4096, and so on."""
    return max(0, math.ceil(math.log(max(1.0, context) / 256, 4)))


def size_class(tokens: int) -> int:
    """Return the class of a number of tokens. There are two classes for each power of two."""
    return round(2 * math.log2(tokens))


class AcceptanceRates:
    """Estimate of the acceptance rate at each level: the probability that a draft token is accepted if all draft tokens
    before it were. A source is a drafter, or look-ahead. The estimator is that of Kaplan and Meier: a row counts only
    at the levels that it reached, so drafts of all lengths are combined. A source's older rounds weigh less."""

    def __init__(self) -> None:
        self.priors: dict[str, float] = {}
        """by source: acceptance rate in its last evaluation"""
        self.counts: dict[str, np.ndarray] = {}
        """by source, [_DEEPEST, 2]: rows that reached each level, and rows whose token there was accepted"""
        self.unused: dict[str, int] = {}
        """by source: number of rounds since it was used"""

    def next_round(self) -> None:
        for source in self.unused:
            self.unused[source] += 1

    def add(self, source: str, depths: Sequence[int], tokens: Sequence[int]) -> None:
        """Count the rows of a round. Row i had a draft of `depths[i]` levels and committed `tokens[i]` tokens, bonus
        token included."""
        drafted = np.array(depths)[:, None]
        right, level = np.minimum(np.array(tokens)[:, None] - 1, drafted), np.arange(_DEEPEST)
        counts = np.stack([(level <= np.minimum(right, drafted - 1)).sum(0), (level < right).sum(0)], axis=1)
        self._set(source, _KEPT * self.counts.get(source, 0.0) + counts)

    def _set(self, source: str, counts: np.ndarray) -> None:
        self.counts[source], self.unused[source] = counts, 0

    def renew(self, source: str, rate: float | None) -> None:
        """Drop the counts of a source. If its acceptance rate in an evaluation is known, it counts like 8 rows that
        have this rate at each level."""
        for of_sources in (self.priors, self.counts, self.unused):
            of_sources.pop(source, None)
        if rate is not None:
            self.priors[source] = rate
            reached = _ROWS_OF_EVALUATION * rate ** np.arange(_DEEPEST, dtype=np.float64)
            self._set(source, np.stack([reached, reached * rate], axis=1))

    def rates(self, source: str, depth: int, prior: float, *, fading: bool = False) -> list[float]:
        """Return the acceptance rates of the first `depth` levels. The rate of the last evaluation, or `prior` without
        one, counts as 2 rows of the first level. The prior of each further level is the rate of the level before it. If
        `fading`, the counts lose weight in rounds that do not use the source."""
        weight = _KEPT ** self.unused.get(source, 0) if fading else 1.0
        known = self.counts[source][:depth].tolist() if source in self.counts else [(0.0, 0.0)] * depth
        rate, found = self.priors.get(source, prior), list[float]()
        for reached, right in known:
            rate = (weight * right + _PRIOR_ROWS * rate) / (weight * reached + _PRIOR_ROWS)
            found.append(rate)
        return found

    def state(self) -> list[Any]:
        return [[source, levels[levels[:, 0] > 0].tolist()] for source, levels in self.counts.items()]

    def load_state(self, state: Iterable[Any], sources: Collection[str]) -> None:
        """Load the counts that `state` returned, for these sources only."""
        for source, levels in state:
            if source in sources:
                counts = np.zeros((_DEEPEST, 2))
                counts[: len(levels)] = np.array(levels).reshape(-1, 2)
                self._set(source, counts)


class Adaptive:
    """Tuner that uses the strategy that it expects to be the fastest.

    `chances` has the acceptance rate of each drafter whose rate is known at the start. A drafter with rate 0 is never
    the fastest, so it is not used. `padded`: whether shorter drafts are padded to the longest one of the pass.
    """

    def __init__(
        self, strategies: Iterable[Strategy], chances: Mapping[str, float] | None = None, padded: bool = False
    ) -> None:
        self.strategies, self.padded = tuple(strategies), padded
        self.times, self.seen = RoundTimes(), AcceptanceRates()
        self.current = PLAIN  # the fastest strategy
        self.spent = self.lost = 0.0  # seconds of all rounds, and seconds that tries lost against plain decoding
        self._widths = sorted({strategy.ahead for strategy in self.strategies} - {0})
        self._ready: set[str] = set()  # drafters that have drafted
        self._rounds, self._is_try = 0, False
        self._class = 0, 0  # context class and size class of this round
        for drafter, chance in (chances or {}).items():
            self.seen.renew(drafter, chance)

    # -- the choice ----------------------------------------------------------------------------------------------------

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        before, self._class = self._class, (context_class(context), size_class(rows))
        self.times.context = self._class[0]
        self._rounds += 1
        if self.times.num_passes(rows) < _ENOUGH_ROUNDS:  # losses are measured against plain decoding
            self.current, self._is_try = PLAIN, False
            return PLAIN
        plain = self.times.round_seconds(PLAIN, rows)
        ready = {name for name in usable if name in self._ready or _preparation(name) * plain <= self.spent}
        arms = [arm for arm in self.strategies if not arm.ahead and (arm == PLAIN or arm.drafter in ready)]
        arm, moved = self.current, before != self._class
        if moved or arm not in arms or self._is_try or self._rounds % _ROUNDS_BETWEEN_COMPARISONS == 0:
            arm = self._compare(arms, rows)
        self._is_try = arm != self.current
        return self._with_ahead(arm, offers) if any(offers) and self._widths else arm

    def _compare(self, arms: Sequence[Strategy], rows: int) -> Strategy:
        """Set `current` to the strategy that is the fastest by the acceptance rates so far. Return the one to try: one
        that may be even faster, if the expected loss of one round is affordable. Else return `current`."""
        seconds = {arm: self.times.round_seconds(arm, rows) for arm in arms}
        known = {arm: self.tokens(arm) for arm in arms}
        speeds = {arm: known[arm] / seconds[arm] for arm in arms}
        best = max(speeds, key=lambda arm: speeds[arm])
        kept = (arm for arm in (PLAIN, self.current) if arm in speeds and speeds[best] < (1 + _MARGIN) * speeds[arm])
        self.current = next(kept, best)
        most = max(_LOST * self.spent, seconds[PLAIN]) - self.lost
        affordable = [arm for arm in arms if arm == self.current or seconds[arm] - known[arm] * seconds[PLAIN] <= most]
        hoped = {arm: self._hoped_speed(arm, rows) for arm in affordable}
        better = [arm for arm in affordable if hoped[arm] > (1 + _MARGIN) * hoped[self.current]]
        return min(better, key=lambda arm: (len(self.times.drafts.get(arm, ())), -hoped[arm]), default=self.current)

    def _with_ahead(self, arm: Strategy, offers: Sequence[int]) -> Strategy:
        """Return the faster of two choices: `arm` for all rows, or look-ahead drafts for the rows that have one. In the
        second case, choose the limit on look-ahead tokens per row, and `arm` or plain decoding for the other rows.
        `offers`: number of look-ahead tokens that each row can propose."""
        rows, others = len(offers), sum(not offer for offer in offers)
        rates = self.seen.rates(_LOOK_AHEAD, self._widths[-1], _ACCEPTANCE_AHEAD)
        expected = list(accumulate(accumulate([1.0, *rates], operator.mul)))  # tokens by length of the draft
        best, most = arm, (1 + _MARGIN) * rows * self.tokens(arm) / self.times.round_seconds(arm, rows)
        # a wide pass is expensive if nothing is accepted
        for width in self._widths if _LOOK_AHEAD in self.seen.counts else self._widths[:1]:
            chains = [min(offer, width) for offer in offers if offer]
            for base in (PLAIN, arm) if others else (PLAIN,):
                share, per_row = self.times.draft_cost(base)
                computed = sum(chains, len(chains)) + others * per_row
                if self.padded:
                    computed = rows * base._replace(ahead=width).new
                whole, plain = self.times.pass_seconds(np.array([computed, rows])).tolist()
                speed = (sum(expected[n] for n in chains) + others * self.tokens(base)) / (whole + share * plain)
                if speed > most:
                    best, most = base._replace(ahead=width), speed
        return best

    # -- estimates -----------------------------------------------------------------------------------------------------

    def tokens(self, arm: Strategy) -> float:
        """Return the expected tokens per row in a round."""
        return 1.0 + sum(accumulate(self.seen.rates(arm.drafter, arm.depth, 0.0), operator.mul))

    def _hoped_speed(self, arm: Strategy, rows: int) -> float:
        """Return the tokens per second and row that a round may reach: if larger passes take no longer until they are
        timed, and if a drafter without recent rounds has the acceptance rate of its last evaluation, or 0.8."""
        rates = self.seen.rates(arm.drafter, arm.depth, _HOPED_ACCEPTANCE, fading=True)
        return (1.0 + sum(accumulate(rates, operator.mul))) / self.times.round_seconds(arm, rows, fixed_share=1.0)

    def free_rows(self, rows: int) -> int:
        """Return the largest number of rows whose plain round takes at most 3 % longer than a round of `rows` rows.
        There is one exception: return `rows` if the larger batch would slow the fastest strategy by over 3 % in tokens
        per second of each row. That is common on CPUs, because drafting pays off there with few rows only."""
        most = self._most_rows(rows, _FREE)
        if most == rows:
            return rows
        arms = [arm for arm in self.strategies if not arm.ahead]
        alone, together = (max(self._hoped_speed(arm, n) for arm in arms) for n in (rows, most))
        return most if _FREE * together >= alone else rows

    def brief_rows(self) -> int:
        """Return the largest number of rows for which a plain round takes at most 1.8 times as long as for one row. On
        a GPU this is a full batch."""
        return self._most_rows(1, _BRIEF)

    def _most_rows(self, rows: int, longer: float) -> int:
        """Return the largest number of rows, up to the tokens of the largest timed pass, for which a plain round takes
        at most `longer` times as long as for `rows` rows."""
        if not self.times.passes:
            return rows
        more = np.arange(rows, max(rows, int(self.times.points()[0][-1])) + 1)
        seconds = self.times.pass_seconds(more)
        return int(more[seconds <= longer * seconds.min()][-1])

    # -- learning from rounds ------------------------------------------------------------------------------------------

    def record(self, result: RoundResult) -> None:
        arm, rows, ahead = result.strategy, len(result.tokens), result.ahead or [0] * len(result.tokens)
        if arm not in self.strategies:
            return
        drafts = arm.drafter != PLAIN.drafter
        self.spent += result.seconds
        if result.scored and (not drafts or arm.drafter in self._ready):  # a first draft takes longer than others
            self.times.add_pass(result.computed, result.seconds - result.drafting)
            plain = self.times.round_seconds(PLAIN, rows)
            if drafts and not any(ahead):
                self.times.add_draft(arm, result.drafting / plain, result.computed / rows)
                self.lost += self._is_try * (result.seconds - plain * statistics.fmean(result.tokens))
        self._ready.add(arm.drafter)
        self.seen.next_round()
        drafted = [n for n, width in zip(result.tokens, ahead, strict=True) if not width]
        if drafts and drafted:
            self.seen.add(arm.drafter, [arm.depth] * len(drafted), drafted)
        if any(ahead):
            levels, right = zip(*((a, n) for n, a in zip(result.tokens, ahead, strict=True) if a), strict=True)
            self.seen.add(_LOOK_AHEAD, levels, right)

    def renew(self, drafter: str, chance: float | None) -> None:
        self._ready.discard(drafter)
        self.seen.renew(drafter, chance)

    def state(self) -> dict[str, Any]:
        return {"times": self.times.state(), "seen": self.seen.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.times.load_state(state.get("times", {}), self.strategies)
        self.seen.load_state(state.get("seen", ()), {*(arm.drafter for arm in self.strategies), _LOOK_AHEAD})


def _preparation(drafter: str) -> float:
    """Return the time, in plain rounds, after which a drafter may be used for the first time: 25 times as long as its
    first draft takes, so that it is at most 4 % of the time."""
    return DRAFTERS[drafter].preparation / _PREPARATION if drafter in DRAFTERS else 0.0
