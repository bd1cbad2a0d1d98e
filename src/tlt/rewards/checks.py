"""Checks of the rewards of a step.

If the responses of two steps in a row have no reward, the run ends. If all rewards of the first step are equal, a
warning shows an answer. If all its responses are left out because they were cut off, a warning says so.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from tlt.rewards.answers import RewardError
from tlt.types import Group, Response, TrainBatch

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


def warn_if_alike(groups: Sequence[Group]) -> None:
    """Log a warning with a response, its answer and the right answer if all rewards of a step are equal. The longest
    response that was not truncated is shown, because a truncated response may score 0 for that reason."""
    rewarded = [response for group in groups for response in group.responses if response.reward is not None]
    if len(rewarded) > 1 and len({response.reward for response in rewarded}) == 1:
        shown = max(rewarded, key=lambda response: (not response.is_truncated, response.num_sampled))
        log.warning(
            "all %d rewards of the first step are %g, so the policy learns nothing; the response …%r has the answer "
            "%r, and the data %r",
            *(len(rewarded), shown.reward, shown.text[-_SHOWN:], shown.answer[-_SHOWN:]),
            shown.request.prompt.ground_truth,
        )


def warn_if_all_masked(batch: TrainBatch) -> None:
    """Log a warning if no response of a batch is trained on, because all were cut off (train.mask_truncated)."""
    if batch.response_ids and len(batch.masked) == len(batch.response_ids):
        log.warning(
            "all %d responses of the first step were cut off, and train.mask_truncated leaves them out of the update, "
            "so the policy learns nothing: raise rollout.max_new_tokens",
            len(batch.masked),
        )
