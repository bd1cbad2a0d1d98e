"""Right answers in the data: text, numbers, truth values, or a list of texts of which each is right."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

from tlt.types import Prompt


def right_answers(prompt: Prompt) -> list[Any]:
    """Return all right answers of a prompt: the items of a list of texts, or else the only answer."""
    found = prompt.ground_truth
    several = isinstance(found, list | tuple) and all(isinstance(item, str) for item in found)
    return list(found) if several else [found]


def is_blank(gold: Any) -> bool:
    """Return whether a right answer is missing: null, NaN or blank text."""
    return gold is None or (isinstance(gold, float) and math.isnan(gold)) or not str(gold).strip()


def same(gold: Any, text: str) -> bool:
    """Return whether a text equals a right answer.

    Numbers are compared as numbers, and the text may have thousands separators then. Truth values are compared without
    regard to case. Anything else is compared as text without outer white space.
    """
    if isinstance(gold, bool):
        return text.strip().casefold() == str(gold).casefold()
    if isinstance(gold, int | float | Decimal):
        try:
            return Decimal(text.strip().replace(",", "")) == Decimal(str(gold))
        except InvalidOperation:  # not a number
            return False
    return text.strip() == str(gold).strip()
