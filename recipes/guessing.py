"""The environment of recipes/guessing.toml: guess a number, and be told after each guess whether it was too low."""

from __future__ import annotations

import re
from typing import Any

_ASKS = "Quick guess: "  # with which the demo's model begins an answer without reasoning


class Guess:
    """A game. A right guess ends it and is worth 1, less 0.2 for each guess before it."""

    def reset(self, prompt: Any) -> str:
        self.number, self.guesses = int(prompt.data["answer"]), 0
        return _ASKS

    def step(self, text: str) -> tuple[str, bool, float]:
        """Return a hint, whether the game is over, and the reward of this guess."""
        guess = re.match(r"(\d+)\.", text)
        if not guess:
            return "", True, 0.0
        apart = int(guess[1]) - self.number
        if not apart:
            return "", True, 1.0 - 0.2 * self.guesses
        self.guesses += 1
        return f"{guess[1]} is too {'low' if apart < 0 else 'high'}.\n{_ASKS}", False, 0.0
