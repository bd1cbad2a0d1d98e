"""Timeouts of calls: a worker that exceeds one counts as lost."""

from __future__ import annotations

from collections import defaultdict, deque

_SHORT = {
    *("decode", "look_ahead", "train_drafter", "evaluate_drafter", "drafter_state", "take_drafter"),
    *("rollout_ended", "forget_older_data", "sync", "trace", "tuner_state", "load_tuner_state", "rendezvous"),
}
"""Calls that take one slice or move little data. The duration of all others grows with the model."""
_LATELY = 5  # number of recent calls that determine the timeout of a long call
_TIMES = 10.0  # timeout of a long call, relative to the longest of these
_UNKNOWN = 12.0  # relative to `patience`, for the first call of a method, which may build the model


class Deadlines:
    """Timeouts. `patience` is the timeout of short calls in seconds, and the smallest timeout of long calls."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._taken: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_LATELY))

    def took(self, method: str, seconds: float) -> None:
        """Record the duration of a call in seconds."""
        self._taken[method].append(seconds)

    def seconds(self, method: str) -> float:
        """Return the timeout of this method in seconds."""
        if method in _SHORT:
            return self.patience
        taken = self._taken[method]
        return max(self.patience, _TIMES * max(taken)) if taken else _UNKNOWN * self.patience
