"""Answer of a response, with the other parts of the response that reward functions receive."""

from __future__ import annotations

from dataclasses import dataclass


class RewardError(ValueError):
    """Error if a reward or an environment cannot be used. The message names it and the remedy."""


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
    start of the text. If `end` is empty, it ends at the end of the text. White space at the end of the marker is
    ignored, because the answer is stripped too: `Answer: ` finds the answer in `Answer:\\n42`.
    """
    _, found, answer = text.rpartition(marker.rstrip() or marker) if marker else ("", "yes", text)
    if end:
        answer, closed, _ = answer.partition(end)
        found = found and closed
    return answer.strip() if found else ""
