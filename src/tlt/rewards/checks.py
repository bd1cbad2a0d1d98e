"""Checks of the rewards of a step.

If the responses of two steps in a row have no reward, the run ends. If all rewards of the first step are equal, a
warning shows what each reward term compared.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from tlt.config import RewardConfig, RewardTerm
from tlt.rewards.answers import RewardError, right_answers
from tlt.rewards.scores import named_terms
from tlt.types import Group, Response
from tlt.wording import counted

log = logging.getLogger(__name__)
_SHOWN = 500
"""largest number of characters of a text in the warning"""


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


def warn_if_alike(groups: Sequence[Group], config: RewardConfig) -> None:
    """Log a warning if all rewards of a step are equal, or if all scores but those of the term `length` are.

    The warning shows one response with its scores and what each reward term compared. The longest response that was
    not truncated is shown, because a truncated response may score 0 for that reason.
    """
    rewarded = [response for group in groups for response in group.responses if response.reward is not None]
    names = [name for name, term in named_terms(config) if term.name != "length"]
    scores = {tuple(response.scores.get(name) for name in names) or response.reward for response in rewarded}
    if len(rewarded) < 2 or len(scores) > 1:
        return
    shown = max(rewarded, key=lambda response: (not response.is_truncated, response.num_sampled))
    ended = "was cut off like all others" if shown.is_truncated else "ended by itself"
    terms = [f"{name}: {_score(shown, name)}, from {seen(term, shown, config)}" for name, term in named_terms(config)]
    if len({response.reward for response in rewarded}) == 1:
        what = f"all {len(rewarded)} rewards of the first step are {shown.reward:g}, so the policy learns nothing"
    else:
        what = f"all {len(rewarded)} responses of the first step have equal scores, so the policy learns length only"
    lines = [
        f"{what}. Example:",
        f"prompt {shown.request.prompt.prompt_id}: {_end(shown.request.prompt.text)!r}",
        f"response, which {ended}: {_end(shown.text)!r}",
        *terms,
    ]
    log.warning("\n  ".join(lines))


def seen(term: RewardTerm, response: Response, config: RewardConfig) -> str:
    """Return text that names what a reward term compares, such as the extracted answer and the right answer."""
    if term.name == "format":
        return f"the pattern {term.pattern!r} and the whole response"
    if term.name == "length":
        return counted(len(response.token_ids), "token")
    golds = " or ".join(repr(gold) for gold in right_answers(response.request.prompt))
    missing = [mark for mark in (config.answer_marker, config.answer_end) if mark.rstrip() not in response.text]
    why = f" (the response has no {' and no '.join(map(repr, missing))})" if missing else ""
    return f"the answer {_end(response.answer)!r}{why} and the data's answer {golds}"


def _score(response: Response, name: str) -> str:
    return f"score {response.scores[name]:g}" if name in response.scores else "does not apply"


def _end(text: str) -> str:
    """Return the text. Cut a text above 500 characters to its last 500, because the answer is usually at the end."""
    return text if len(text) <= _SHOWN else f"…{text[-_SHOWN:]}"
