"""Interpolation between measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

X = TypeVar("X", bound=float)


def interpolate(points: Mapping[X, float], x: float) -> float:
    """Interpolate linearly between the points; return the nearest value beyond them."""
    below = max((k for k in points if k <= x), default=min(points))
    above = min((k for k in points if k >= x), default=max(points))
    low, high = points[below], points[above]
    return low if above == below else low + (high - low) * (x - below) / (above - below)
