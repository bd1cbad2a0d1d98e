"""Answers: the parts of a response that a reward receives."""

from __future__ import annotations

from dataclasses import dataclass


class RewardError(ValueError):
    """Error because a reward cannot be used. The message names the reward and the remedy."""


@dataclass(frozen=True)
class Answer:
    text: str
    """text of the whole response"""
    answer: str
    """text after the marker"""
    tokens: int
    """number of tokens of the response"""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    """`stop` or `length`"""


def extract_answer(text: str, marker: str, end: str = "") -> str:
    """Return the text after the last `marker` and before the next `end`, stripped.

    The answer is empty if the marker is missing, or if no `end` follows. If `marker` is empty, the answer begins at the
    start of the text. If `end` is empty, it ends at the end of the text. White space at the end of the marker is
    ignored, because the answer is stripped too: `Answer: ` finds the answer in `Answer:\\n42`.
    """
    _, found, answer = text.rpartition(marker.rstrip() or marker) if marker else ("", "yes", text)
    if end:
        answer, closed, _ = answer.partition(end)
        found = found and closed
    return answer.strip() if found else ""
