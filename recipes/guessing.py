"""The environment of recipes/guessing.toml: guess a number, and be told after each guess whether it was too low."""

from __future__ import annotations

import re
from typing import Any

_ANSWER = re.compile(r"Answer: (\d+)")


class Guess:
    """An episode of the game. A right guess is worth 1, and less by 0.1 for each guess before it."""

    def reset(self, prompt: Any) -> None:
        self.number = int(prompt.data["answer"])
        self.guesses = 0

    def step(self, text: str) -> tuple[str, bool, float]:
        """Return a hint, whether the game is over, and the reward of this guess."""
        found = _ANSWER.findall(text)
        if not found:
            return "", True, 0.0
        guess, self.guesses = int(found[-1]), self.guesses + 1
        if guess == self.number:
            return "", True, 1.1 - 0.1 * self.guesses
        return f"\n{guess} is too {'low' if guess < self.number else 'high'}.\n", False, 0.0
