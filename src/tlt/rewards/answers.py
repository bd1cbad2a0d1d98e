"""What a reward is given of a response."""

from __future__ import annotations

from dataclasses import dataclass


class RewardError(ValueError):
    """A reward that cannot be used; the message names it and the remedy."""


@dataclass(frozen=True)
class Answer:
    text: str
    """the whole response"""
    answer: str
    """what follows the marker"""
    tokens: int
    """of the response"""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    """`stop` or `length`"""


def extract_answer(text: str, marker: str, end: str = "") -> str:
    """Return the text after the last `marker` and before the next `end`, stripped.

    It is empty if the marker is missing, or if no end follows. Without a marker it is the whole text, and without an
    end it goes up to the end of the text. White space at the end of the marker is ignored, because the answer is
    stripped too: `Answer: ` finds the answer in `Answer:\\n42`.
    """
    _, found, answer = text.rpartition(marker.rstrip() or marker) if marker else ("", "yes", text)
    if end:
        answer, closed, _ = answer.partition(end)
        found = found and closed
    return answer.strip() if found else ""
