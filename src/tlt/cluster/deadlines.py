"""How long a worker may take for a call before it counts as hung."""

from __future__ import annotations

from collections import defaultdict, deque

_SHORT = {
    *("decode", "look_ahead", "train_drafter", "evaluate_drafter", "drafter_state", "take_drafter"),
    *("rollout_ended", "forget_older_data", "sync", "trace", "tuner_state", "load_tuner_state", "rendezvous"),
}
"""calls that take a slice, or move little; the time of all others grows with the model"""
_LATELY = 5  # number of last calls that set the deadline of a long call
_TIMES = 10.0  # a long call may take so many times the longest of these
_UNKNOWN = 12.0  # times the patience, for a long call that never came back yet: a worker's first one builds its model


class Deadlines:
    def __init__(self, patience: float) -> None:
        """`patience`: seconds that a short call may take, and the least that any call may take."""
        self.patience = patience
        self._taken: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_LATELY))

    def took(self, method: str, seconds: float) -> None:
        """A call came back after so many seconds."""
        self._taken[method].append(seconds)

    def seconds(self, method: str) -> float:
        """Seconds that a call of this method may take."""
        if method in _SHORT:
            return self.patience
        taken = self._taken[method]
        return max(self.patience, _TIMES * max(taken)) if taken else _UNKNOWN * self.patience
