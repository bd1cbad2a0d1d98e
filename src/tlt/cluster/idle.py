"""Decides what an idle worker that helps no other does: train the drafter, or decode ahead."""

from __future__ import annotations

from tlt.cluster.ahead import LookingAhead
from tlt.cluster.crew import Crew
from tlt.cluster.publication import Publication
from tlt.draft.guard import Guard


class IdleTime:
    """Compares the seconds that training and decoding ahead are predicted to save in the rollouts to come."""

    def __init__(self, drafter: Guard[Publication], ahead: LookingAhead, crew: Crew) -> None:
        self.drafter, self.ahead, self.crew = drafter, ahead, crew
        self._in_turn = False

    def may_train(self) -> bool:
        return self.drafter(lambda it: it.life.gate.should_train(), False)

    def training_saves(self, seconds: float) -> float:
        return self.drafter(lambda it: it.life.gate.saves(seconds), 0.0)

    def training_saves_more(self) -> bool:
        training, ahead = self.training_saves(1.0), self.ahead.value.saves(1.0, len(self.crew.present))
        return training > ahead

    def rather_trains(self) -> bool:
        """Whether to train, not to decode ahead. As long as the worth of one is not known, they take turns."""
        if self.ahead.value.is_known and self.drafter(lambda it: it.life.gate.decision, None):
            return self.training_saves_more()
        self._in_turn = not self._in_turn
        return self._in_turn
