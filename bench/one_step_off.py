"""A training run that is off-policy by one step: a step's update overlaps with the decoding of the next step.

    python bench/one_step_off.py CONFIG THREADS

`bench/early_update.py --one-step-off` starts it, for comparison. Workers that have nothing left to decode compute the
gradients of the step before, of which all responses are known. The rest of that update follows the rollout, among it
the longest eighth of its groups. The ratio is to the log-probs of the policy that decoded. A run decodes twice in its
first step and not at all in its last one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, cast

from one_run import main
from turns import over_pipes

from tlt.cluster.remote import ClusterRollout
from tlt.loop import Rollout
from tlt.rl.early import EarlyGroups
from tlt.types import Request, Response, RolloutStats


class OneStepOff:
    """A rollout that returns the responses that it decoded in the step before."""

    def __init__(self, rollout: ClusterRollout) -> None:
        self.rollout = rollout
        rollout.coordinator.idle.early.most = math.inf  # all shards of the step before are known from the start
        self._decoded: list[Response] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None],
        coming: Iterable[list[Request]] = (),
        early: EarlyGroups | None = None,
    ) -> tuple[list[Response], RolloutStats]:
        responses = self._decoded or self.rollout.generate(requests, _ignore)[0]
        for response in responses:
            response.old_logprobs = list(compress(response.full_logprobs, response.mask))
            on_response(response)
        later = iter(coming)
        wanted = next(later, [])
        self._decoded, stats = self.rollout.generate(wanted, _ignore, later, early) if wanted else ([], RolloutStats())
        return responses, stats


def _ignore(response: Response) -> None:
    """Keep the response until its step."""


def one_step_off(rollout: Rollout) -> Rollout:
    assert isinstance(rollout, ClusterRollout), "several workers"
    return cast("Rollout", OneStepOff(rollout))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), over_pipes(), one_step_off)
