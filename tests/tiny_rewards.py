"""Rewards for tests, in a module that imports nothing heavy: their process starts in a moment."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any


def share_of_low_bytes(prompt: Any, answer: str) -> float:
    """A reward that varies between the answers of a random model."""
    return sum(char < "m" for char in answer) / max(1, len(answer))


def every_third(prompt: Any, answer: str) -> float:
    """A reward that many groups of a random model agree on, by the first letter."""
    return float(sum(map(ord, answer[:1])) % 3 == 0)


def trouble(prompt: Any, answer: str) -> Any:
    """The answer says what happens."""
    match answer.split():
        case ["hang"]:
            time.sleep(3600)
        case ["raise"]:
            raise KeyError("bonus")
        case ["exit"]:
            sys.exit(3)
        case ["die"]:
            os._exit(1)
        case ["nan"]:
            return math.nan
        case ["infinite"]:
            return -math.inf
        case ["word"]:
            return "good"
        case ["nothing"]:
            return None
        case ["child"]:
            return float(os.getpid())
    return float(len(answer)) + prompt.data.get("bonus", 0)


def raises_now_and_then(prompt: Any, answer: str) -> float:
    if len(answer) % 3 == 0:
        raise ValueError("a length that cannot be judged")
    return share_of_low_bytes(prompt, answer)


constant = 3
