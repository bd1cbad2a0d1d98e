"""The environment of recipes/calculator.toml: a model that does sums with a calculator.

The demo's model works a sum out line by line, such as `23 + 60: 3+0=3, 2+6=8 -> 83.` Its turn ends at the colon. If a
sum stands before it, the calculator writes ` -> 83`, and the model goes on. Else the reply is empty.
"""

from __future__ import annotations

import re
from typing import Any

_CALL = re.compile(r"(-?)\(?(-?\d+) ([+-]) (\d+)\)?:\s*$")
_ANSWER = re.compile(r"Answer: (-?\d+)$")


class Calculator:
    """An answer that is right is worth 1."""

    def reset(self, prompt: Any) -> None:
        self.answer = str(prompt.data["answer"])
        self.text = ""

    def step(self, text: str) -> tuple[str, bool, float]:
        """Return the calculator's result, whether the model has answered, and the reward."""
        self.text += text
        if answer := _ANSWER.search(self.text):
            return "", True, float(answer[1] == self.answer)
        return calculated(text), ":" not in text, 0.0


def calculated(text: str) -> str:
    """Return what the calculator writes behind a sum: `23 + 60:` gives ` -> 83`, and `is -(9 - 4):` gives ` -> -5`."""
    call = _CALL.search(text)
    if not call:
        return ""
    outer, first, sign, second = call.groups()
    value = int(first) + int(sign + second)
    return f" -> {-value if outer else value}"
