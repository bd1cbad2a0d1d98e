"""Right answers as data has them: text, numbers, truth values, or a list of texts of which each is right."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

from tlt.types import Prompt


def right_answers(prompt: Prompt) -> list[Any]:
    """Return the answers any of which is right: the items of a list of texts, or else the one that there is."""
    found = prompt.ground_truth
    several = isinstance(found, list | tuple) and all(isinstance(item, str) for item in found)
    return list(found) if several else [found]


def is_blank(gold: Any) -> bool:
    """Whether there is nothing to compare with: null, NaN, or text without a character."""
    return gold is None or (isinstance(gold, float) and math.isnan(gold)) or not str(gold).strip()


def same(gold: Any, text: str) -> bool:
    """Compare a number as a number, a truth value without regard to case, and anything else as text without outer white
    space. The text may have thousands separators where the right answer is a number."""
    if isinstance(gold, bool):
        return text.strip().casefold() == str(gold).casefold()
    if isinstance(gold, int | float | Decimal):
        try:
            return Decimal(text.strip().replace(",", "")) == Decimal(str(gold))
        except InvalidOperation:  # no number
            return False
    return text.strip() == str(gold).strip()
