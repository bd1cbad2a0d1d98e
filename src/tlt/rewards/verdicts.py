"""Verdicts: the result of scoring a response, or of a call to an environment for its reply to a turn.

If the responses of two steps in a row have no reward, the run ends. If all rewards of the first step are equal, a
warning shows an answer. If all its responses are left out because they were cut off, a warning says so.
"""

from __future__ import annotations

import logging
import math
import os
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tlt.data.continuation import ReplyContent
from tlt.rewards.answers import RewardError
from tlt.types import Group, Response, TrainBatch

log = logging.getLogger(__name__)
_LIBRARIES = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
_SHOWN = 500  # largest number of characters of a text in a warning
_printed = set[tuple[str, type]]()  # (place in the code, type) of the errors whose traceback was printed
LARGEST = 3.4e38  # largest float32; means and standard deviations of larger rewards overflow


class Verdict(NamedTuple):
    reward: float | None
    """reward of the response or of the turn; None if there is none"""
    outcome: str = ""
    """reason why there is no reward: timeout, error, not a number, does not apply, crash"""
    detail: str = ""
    """explanation of the outcome for the log, such as the text of an exception"""
    scores: Mapping[str, float] = {}
    """score of each reward term before its weight, or the environment's `scores`; empty if there is no reward"""
    reply: ReplyContent | None = None
    """reply of an environment to a turn, a text or messages; None if the episode is over or there is no environment"""


DIED = Verdict(None, "crash", "its process ended")


def failed(error: BaseException) -> Verdict:
    """Return the verdict for an exception that user code raised. Print the traceback, once for each place and type."""
    if isinstance(error, TimeoutError):
        return Verdict(None, "timeout", _text(str, error))
    place = _place_of(error)
    if (place, type(error)) not in _printed:
        _printed.add((place, type(error)))
        traceback.print_exception(error)
    return Verdict(None, "error", f"{place}{type(error).__name__}: {_text(str, error)}")


def _place_of(error: BaseException) -> str:
    """Return the innermost line of the traceback that is in a file of the user, such as `/home/me/rewards.py:12: `, or
    an empty text if there is none."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if os.path.isabs(file) and not any(file.startswith(folder + os.sep) for folder in _LIBRARIES):
            found = f"{file}:{line}: "
    return found


def number(value: Any) -> tuple[float, Verdict | None]:
    if isinstance(value, BaseException):
        return math.nan, failed(value)
    try:
        score = float(value)
    except Exception:  # float() of an object of the user may raise any exception
        score = math.nan
    if abs(score) <= LARGEST:
        return score, None
    beyond = ", which float32 cannot hold" if math.isfinite(score) else ""
    return score, Verdict(None, "not a number", f"it returned {_text(repr, value)[:200]}{beyond}")


def _text(form: Callable[[object], str], thing: object) -> str:
    """Return `form(thing)`, where `form` is str or repr. If this raises an exception, which a class of the user may do,
    return a text with the name of the class."""
    try:
        return form(thing)
    except Exception:
        return f"a {type(thing).__name__} that cannot be printed"


# -- checks of the rewards of a step -----------------------------------------------------------------------------------


class FaultLog:
    """Log of responses without a reward. Only the first response with each outcome, such as `timeout`, is logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, response: Response, detail: str) -> None:
        if response.outcome and response.outcome not in self._logged:
            self._logged.add(response.outcome)
            which = f"prompt {response.request.prompt.prompt_id}, response {response.text[:80]!r}"
            cause = f"{' '.join(detail.split())[:300]}; {which}"
            log.warning("a response has no reward (%s: %s); more of these are only counted", response.outcome, cause)


class Unrewarded:
    """Counter of consecutive steps in which no response has a reward."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def refuse_another(self, groups: Sequence[Group], step: int, last: bool) -> None:
        """Log a warning if no response of this step has a reward. If the same was true of the previous step, or if this
        step is the `last` one, raise RewardError instead."""
        responses = [response for group in groups for response in group.responses]
        if any(response.reward is not None for response in responses):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        causes = ", ".join(f"{count} {why}" for why, count in Counter(r.outcome for r in responses).most_common())
        problem = f"none of the {len(responses)} responses of step {step + 1} has a reward ({causes})"
        if last or self.in_a_row > 1:
            before = "" if self.in_a_row == 1 else ", nor has any response of the previous step"
            raise RewardError(
                f"{problem}{before}: fix the reward function or the environment. If its file changes, --resume needs "
                "--force with the field that names it (reward.name, reward.terms or reward.environment)"
            )
        log.warning("%s: a second such step in a row ends the run", problem)


def warn_if_alike(groups: Sequence[Group]) -> None:
    """Log a warning with a response if all rewards of a step are equal: with its answer and the right answer, or with
    the finish reason of an episode. The longest response that was not truncated is shown, because a truncated response
    may score 0 for that reason."""
    rewarded = [response for group in groups for response in group.responses if response.reward is not None]
    if len(rewarded) > 1 and len({response.reward for response in rewarded}) == 1:
        shown = max(rewarded, key=lambda response: (not response.is_truncated, response.num_sampled))
        answer = f" has the answer {shown.answer[-_SHOWN:]!r}, and the data {shown.request.prompt.ground_truth!r}"
        if shown.request.sampling.continues:  # the environment of an episode reads no answer
            answer = f" ended by {shown.finish_reason!r}"
        log.warning(
            "all %d rewards of the first step are %g, so the policy learns nothing; the response …%r%s",
            *(len(rewarded), shown.reward, shown.text[-_SHOWN:], answer),
        )


def warn_if_all_masked(batch: TrainBatch) -> None:
    """Log a warning if no response of a batch is trained on, because all were cut off (train.mask_truncated)."""
    if batch.response_ids and len(batch.masked) == len(batch.response_ids):
        log.warning(
            "all %d responses of the first step were cut off, and train.mask_truncated leaves them out of the update, "
            "so the policy learns nothing: raise rollout.max_new_tokens",
            len(batch.masked),
        )
