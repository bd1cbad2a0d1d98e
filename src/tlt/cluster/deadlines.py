"""Timeouts of worker calls. A worker that exceeds the timeout of its call counts as lost."""

from __future__ import annotations

from collections import defaultdict, deque

_SHORT = {
    *("decode", "look_ahead", "train_drafter", "evaluate_drafter", "drafter_state", "take_drafter"),
    *("rollout_ended", "forget_older_data", "sync", "trace", "tuner_state", "load_tuner_state", "rendezvous"),
}
"""Methods whose calls take one slice or move little data. The duration of all other methods grows with the model."""
_LATELY = 5  # number of recent calls of a long method that determine its timeout
_TIMES = 10.0  # timeout of a long method, as a multiple of its longest recent call
_UNKNOWN = 12.0  # timeout of the first call of a long method, relative to `patience`; the call may build the model


class Deadlines:
    """Timeouts of worker calls, by method. `patience`: timeout in seconds of short calls, and minimum of others."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._taken: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_LATELY))

    def took(self, method: str, seconds: float) -> None:
        """Record that a call of this method took this many seconds."""
        self._taken[method].append(seconds)

    def seconds(self, method: str) -> float:
        """Return the timeout of this method in seconds."""
        if method in _SHORT:
            return self.patience
        taken = self._taken[method]
        return max(self.patience, _TIMES * max(taken)) if taken else _UNKNOWN * self.patience
