"""The environment of recipes/guessing.toml: guess a number, and be told after each guess how far it was off."""

from __future__ import annotations

import re
from typing import Any

_ASKS = "Quick guess: "  # with which the demo's model begins an answer without reasoning


class Guess:
    """A game. A right guess ends it and is worth 1, less 0.25 for each turn before it.

    After a wrong guess the model has to work out a sum, such as `3+4=`, to know the number.
    """

    def reset(self, prompt: Any) -> str:
        self.number, self.worth = int(prompt.data["answer"]), 1.0
        return _ASKS

    def step(self, text: str) -> tuple[str, bool, float]:
        """Return a hint, whether the game is over, and the reward of this guess."""
        guess = re.search(r"\d+", text)
        if guess and int(guess[0]) == self.number:
            return "", True, self.worth
        self.worth -= 0.25
        if not guess:
            return f"Say a number.\n{_ASKS}", False, 0.0
        apart = int(guess[0]) - self.number
        much = f"{guess[0]} is too {'low' if apart < 0 else 'high'} by {abs(apart)}."
        return f"{much}\n{_ASKS}{guess[0]}{'+' if apart < 0 else '-'}{abs(apart)}=", False, 0.0
