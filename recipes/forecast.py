"""The reward of recipes/forecast.toml: how good a forecast distribution was, by a proper scoring rule.

An answer names a normal distribution, such as `41 2.5` for mean and deviation. Its score is the continuous ranked
probability score (Gneiting and Raftery, 2007), in units of the series' usual step, with the sign of a reward: no other
answer than the model's true belief has a better mean. An answer that names none gets -2, and none gets less.
"""

from __future__ import annotations

import math
import re
from typing import Any

WORST = -2.0
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def crps(prompt: Any, answer: str) -> float:
    """-CRPS / scale of the forecast; `prompt.data` is the row: its `answer` is what came, `scale` the unit."""
    numbers = [float(text) for text in _NUMBER.findall(answer)]
    if len(numbers) != 2 or not 0 < numbers[1] < 1e6 or abs(numbers[0]) > 1e6:
        return WORST
    return max(WORST, -crps_of_normal(*numbers, prompt.data["answer"]) / prompt.data["scale"])


def crps_of_normal(mean: float, deviation: float, came: float) -> float:
    """deviation * (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)) with z = (came - mean) / deviation; 0 is perfect."""
    z = (came - mean) / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return deviation * (z * math.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))
