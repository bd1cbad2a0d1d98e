"""What a planted fault is."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    """the fault in words"""
    file: str
    """under src/tlt"""
    old: str
    """its text, which occurs there exactly once"""
    new: str
    tests: str
    """under tests, those that should notice; several with a space between"""
