"""Reward of recipes/smollm2.toml: does the text hold the words that the prompt asks for?"""

from __future__ import annotations

import re
from typing import Any


def share_of_words(prompt: Any, answer: str) -> float:
    """Return the share of the row's words, separated by commas in its `answer`, that the text holds as whole words."""
    wanted = prompt.data["answer"].split(", ")
    found = set(re.findall(r"\w+", answer.lower()))
    return sum(word in found for word in wanted) / len(wanted)
