"""Functions for the wording of messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, such as `1 step` or `1,200 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
