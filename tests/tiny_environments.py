"""Environments for tests, in a module without heavy imports, so that their process starts fast."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from tlt import Tools


class Echo:
    """Environment that replies with the turn's letters, shifted in the alphabet. An episode has three turns."""

    def reset(self, prompt: Any) -> str | None:
        self.turns, self.opens = 0, prompt.text.startswith("a")
        return "Go: " if self.opens else None

    def step(self, text: str) -> tuple[str, bool, float]:
        self.turns += 1
        low = sum(char < "m" for char in text) / max(1, len(text))
        return "".join(chr(97 + (ord(char) + 1) % 26) for char in text[-5:]), self.turns == 3, low


class Unsure(Echo):
    """Echo with a reply that differs each time. It records its calls in the file that the row names."""

    def reset(self, prompt: Any) -> str | None:
        self.calls = Path(prompt.data["calls"])
        return super().reset(prompt)

    def step(self, text: str) -> tuple[str, bool, float]:
        with self.calls.open("a", encoding="utf-8") as file:
            file.write(f"{text!r}\n")
        reply, done, reward = super().step(text)
        return f"{reply}{os.urandom(2).hex()}", done, reward


class Nap:
    """Environment whose turn is the number of seconds that it takes."""

    def reset(self, prompt: Any) -> None:
        self.turns = 0

    async def step(self, text: str) -> tuple[str, bool, float]:
        await asyncio.sleep(float(text))
        self.turns += 1
        return f"turn {self.turns}", False, 0.0


class Slow(Echo):
    def step(self, text: str) -> tuple[str, bool, float]:
        time.sleep(0.05)
        return super().step(text)


class Trouble:
    """Environment whose turn names the fault."""

    def reset(self, prompt: Any) -> Any:
        self.turns = 0
        if prompt.text == "raises at once":
            raise KeyError("bonus")
        if prompt.text == "messages at once":
            return [{"role": "user", "content": "a"}]
        return None

    def step(self, text: str) -> Any:
        self.turns += 1
        match text:
            case "raise":
                raise KeyError("bonus")
            case "die":
                os._exit(1)
            case "nothing":
                return None
            case "two":
                return "reply", True
            case "number":
                return 7, False, 0.0
            case "written":
                return getattr(text, "written", ""), False, 0.0
            case "messages":
                return [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], False, 0.0
            case "no messages":
                return [{"role": "user"}], False, 0.0
            case "half messages":
                return [{"role": "user", "content": "\ud800"}], False, 0.0
            case "half":
                return "\ud800", False, 0.0
            case "nan":
                return "", False, float("nan")
            case "odd scores":
                self.scores = {"calls": "many"}
            case "allocate":
                return "x" * 2**33, False, 0.0
        return f"turn {self.turns}", False, 0.5


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: A number.
        second: Another number.
    """
    return first + second


def look_up(word: str, table: dict[str, str] | None = None) -> dict[str, str]:
    """Look a word up.

    Args:
        word: The word.
        table: Where to look.
    """
    return {"found": (table or {"é": "e"})[word]}


class Desk(Tools):
    tools = (add, look_up)

    def score(self, prompt: Any, answer: str) -> float:
        return float(answer.endswith(str(prompt.data["answer"])))


class Undescribed(Desk):
    tools = (lambda word: word,)


class NoStep:
    def reset(self, prompt: Any) -> None: ...
