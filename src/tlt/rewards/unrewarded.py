"""Handling of responses without a reward. A step without any reward is logged. Two such steps in a row end the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from tlt.rewards.answers import RewardError
from tlt.types import Group, Response

log = logging.getLogger(__name__)


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
        """Raise RewardError if no response of this step and the previous step has a reward, or of this step if it is
        the `last` one. Log a warning if only this step is without rewards."""
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
