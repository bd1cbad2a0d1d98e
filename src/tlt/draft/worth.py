"""Whether training the drafter pays: plain arithmetic on what the gate measured.

Two things are known of a drafter: what a judged stretch of training gained (candidate against the one in use, on the
same held-back harvest), and its accept length on fresh harvest, step after step, while the target moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Worth:
    """Accept lengths are means of `SpotTrainer.judge`."""

    def fresh(self, accept_length: float) -> None:
        """Once a step: of the drafter in use, on harvest of the present target."""

    def gained(self, in_use: float, candidate: float, seconds: float) -> None:
        """A stretch of training was judged: both accept lengths on the same harvest, and the seconds it took since the
        judgement before."""

    def should_train(self) -> bool:
        """Whether idle time is to be trained in: not by a drafter that no longer gains, but again by one that went
        stale."""

    def pays_back(self, rollout_seconds: float) -> bool:
        """Whether a second of training that is *not* idle time saves more than that of the rollouts to come, each of so
        many seconds."""

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""

    def load_state(self, state: Mapping[str, Any]) -> None: ...
