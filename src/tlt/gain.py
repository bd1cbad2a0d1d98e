"""Verdict on the speed of speculation: is there a measured gain over plain decoding, and how large is it?

It compares the seconds of steps that were decoded both ways (`run.compare_every`), one pair per step. `tlt estimate`,
the last lines of a run and report.html use the same verdict."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from math import comb
from statistics import median
from typing import Any, NamedTuple

from tlt.wording import counted

NO_DRAFT = "no draft was used"
FEWEST = 3  # number of pairs from which a gain may be claimed
_BUSY = 0.15  # waiting share from which other work disturbs the times
_CONFIDENCE = 0.95
_LEAST = 1.005  # smaller gains are shown as 1.00
_NOTABLE = 1.0  # seconds of waiting in a step from which the run warns
_log = logging.getLogger(__name__)
_LITTLE = 1.05  # gain over plain decoding below which `NO_GAIN` is shown
NO_GAIN = (
    "speculation gained little or nothing, because few draft tokens were accepted for the time they took. A drafter "
    "for this model and these prompts helps most: `tlt draft train RECIPE --out FOLDER` trains one in some minutes, "
    "and --speculation.path FOLDER loads it. More --tokens make a drafter better. Short responses and a high "
    "temperature gain least"
)


class Gain(NamedTuple):
    """Speed of rollouts relative to plain decoding, from pairs of the same rollout with and without speculation."""

    times: float | None
    """claimed gain, at most `accept_length`; None if no gain was measured"""
    median: float
    """median over the pairs of (seconds with plain decoding) / (seconds with speculation)"""
    low: float
    high: float
    """interval of the median: 95 % by order statistics with six pairs or more, else the smallest and largest pair"""
    pairs: int
    accept_length: float
    """tokens per target pass of the passes that had a draft; 1 if there was none"""
    fault: str
    """reason why no gain is claimed, or empty"""
    is_trusted: bool
    """False if other work took the cores, so that no time can be trusted"""


def gain_of(lines: Sequence[Mapping[str, Any]]) -> Gain | None:
    """Return the verdict from lines of metrics.jsonl; None if no step was decoded both ways.

    The first step of a run is left out, because it includes the start-up of the engine and of the drafters."""
    found = [line for line in lines if _both(line)]
    if not found:
        return None
    found = [line for line in found if line["step"] > 1] or found
    times = sorted(line["seconds"]["compare"] / line["seconds"]["rollout"] for line in found)
    middle, (low, high) = median(times), _interval(times)
    passes, accepted = (sum(line["rollout"].get(name, 0) for line in found) for name in ("draft_passes", "accepted"))
    accept_length = 1 + accepted / passes if passes else 1.0
    phases = [line.get("energy", {}).get("phases", {}) for line in found]
    waiting = _waiting_share([phase.get(name, {}) for phase in phases for name in ("compare", "rollout")])
    is_trusted = waiting < _BUSY
    fault = ""
    if not is_trusted:
        fault = f"{_cores_were_busy(waiting)}: {_remedy()}, and measure again"
    elif not passes:
        fault = NO_DRAFT
    elif len(found) < FEWEST or found[0]["step"] == 1:
        fault = f"a gain needs {FEWEST} compared steps after the first step"
    elif low <= 1 <= high:
        fault = "the interval contains 1.00"
    elif high < 1:
        fault = "speculation was slower than plain decoding"
    elif min(middle, accept_length) < _LEAST:
        fault = "hardly any draft token was accepted"
    claimed = None if fault else min(middle, accept_length)
    return Gain(claimed, middle, low, high, len(found), accept_length, fault, is_trusted)


def _both(line: Mapping[str, Any]) -> bool:
    seconds = line.get("seconds", {})
    return bool(seconds.get("compare") and seconds.get("rollout"))


def _interval(times: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the median of sorted values. Each value is above the median with probability 1/2, so the
    ranks follow from the binomial distribution. Fewer than six values are too few for 95 %: then return the smallest
    and the largest."""
    number, outside, rank = len(times), 0.0, 0
    while rank < number // 2:
        outside += 2 * comb(number, rank) / 2**number
        if outside > 1 - _CONFIDENCE:
            break
        rank += 1
    rank = max(1, rank)
    return times[rank - 1], times[-rank]


def _waiting_share(used: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the time of the run's threads in which they waited for a free core. It is 0 if the system
    does not count it. `used` has the counters of `tlt.energy` for several periods."""
    waited, computed = (sum(each.get(name, 0.0) for each in used) for name in ("cpu_wait_seconds", "cpu_seconds"))
    return waited / (waited + computed) if waited else 0.0


def _remedy() -> str:
    """Return the remedy for busy cores. OMP_NUM_THREADS=1 is left out if it is set already."""
    fewer = "" if os.environ.get("OMP_NUM_THREADS") == "1" else ", set OMP_NUM_THREADS=1,"
    return f"end other programs{fewer} or use fewer workers"


def _cores_were_busy(waiting: float) -> str:
    return f"the run's threads waited {waiting:.0%} of their time for a free core, because other work used the cores"


class BusyWarning:
    """Warning, given once in a run, that the threads of a step waited for free cores."""

    def __init__(self) -> None:
        self._is_given = False

    def warn(self, step: int, energy: Mapping[str, Any]) -> None:
        """Log the warning if a step spent much time waiting. `energy` is that of the step's metrics."""
        waiting = _waiting_share([energy])
        if waiting >= _BUSY and energy["cpu_wait_seconds"] >= _NOTABLE and not self._is_given:
            self._is_given = True
            _log.warning("in step %d %s: %s", step, _cores_were_busy(waiting), _remedy())


def verdict(gain: Gain) -> str:
    """Return the verdict as a sentence without a full stop."""
    spread = f"{gain.low:.2f} to {gain.high:.2f} times in {counted(gain.pairs, 'step')}"
    if gain.times is None:
        return f"no gain over plain decoding was measured ({spread}): {gain.fault}"
    if gain.times < gain.median:
        return (
            f"rollouts were at most {gain.times:.2f} times as fast as plain decoding, because that is the accept "
            f"length of the drafts (the seconds say {gain.median:.2f}, {spread})"
        )
    return f"rollouts were {gain.times:.2f} times as fast as plain decoding (median; {spread})"


def gained_little(gain: Gain) -> bool:
    """Return whether drafts were used and gained little or nothing."""
    was_used = gain.is_trusted and gain.fault != NO_DRAFT
    return was_used and gain.pairs >= FEWEST and (gain.times or 1.0) < _LITTLE


def same_tokens(compared: dict[str, Any]) -> str:
    """Return text that says whether the responses equal those of plain decoding, or how many differ."""
    if not compared["differ"]:
        return "same tokens"
    return f"{compared['differ']:,} of {counted(compared['responses'], 'response')} differ"


def why_they_differ(summary: Mapping[str, Any]) -> str:
    """Return text on the cause of responses that differ from those of plain decoding."""
    if summary["exact"]:
        return "the engine was exact at the start, so this is a bug in tlt: `tlt verify` shows which responses differ"
    return f"{summary['exactness']}. The two times are of different responses"
