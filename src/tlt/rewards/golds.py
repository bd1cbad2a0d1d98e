"""Right answers in the data. Each is a text, a number, a truth value or a list of texts, any of which is right."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

from tlt.types import Prompt


def right_answers(prompt: Prompt) -> list[Any]:
    """Return the right answers of a prompt: its ground truth, or the items of its ground truth if that is a list of
    texts."""
    found = prompt.ground_truth
    several = isinstance(found, list | tuple) and all(isinstance(item, str) for item in found)
    return list(found) if several else [found]


def is_blank(gold: Any) -> bool:
    """Return whether a right answer is missing: null, NaN or blank text."""
    return gold is None or (isinstance(gold, float) and math.isnan(gold)) or not str(gold).strip()


def same(gold: Any, text: str) -> bool:
    """Return whether the text of an answer equals a right answer (`gold`).

    A number is compared by value, and `text` may then contain thousands separators. A truth value is compared without
    regard to case. Everything else is compared as text without leading and trailing white space.
    """
    if isinstance(gold, bool):
        return text.strip().casefold() == str(gold).casefold()
    if isinstance(gold, int | float | Decimal):
        try:
            return Decimal(text.strip().replace(",", "")) == Decimal(str(gold))
        except InvalidOperation:  # not a number
            return False
    return text.strip() == str(gold).strip()
