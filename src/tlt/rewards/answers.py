"""Answers: the answer that a response gives, and the right answers in the data.

The ground truth of a prompt is a text, a number or a truth value. If it is a list of texts, each text is a right
answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from tlt.types import Prompt


class RewardError(ValueError):
    """Error: a reward or an environment cannot be used. The message names the reward or environment, and the remedy."""


@dataclass(frozen=True)
class Answer:
    text: str
    """text of the whole response, with the prefill"""
    answer: str
    """part of the text that `extract_answer` finds between reward.answer_marker and reward.answer_end"""
    tokens: int
    """number of tokens in the response"""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    """`stop`, or `length` if the response was truncated"""


def extract_answer(text: str, marker: str, end: str = "") -> str:
    """Return the text after the last `marker` and before the next `end`, stripped.

    The answer is empty if the marker is missing, or if no `end` follows. If `marker` is empty, the answer begins at the
    start of the text. If `end` is empty, the answer ends at the end of the text. White space at the end of the marker
    is ignored, because the answer is stripped too: `Answer: ` finds the answer in `Answer:\\n42`.
    """
    _, found, answer = text.rpartition(marker.rstrip() or marker) if marker else ("", "yes", text)
    if end:
        answer, closed, _ = answer.partition(end)
        found = found and closed
    return answer.strip() if found else ""


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
