"""How steep the law of learning is in this run, fitted on judgements of candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class FittedSlope:
    """b of ln(1 - agreement) = c - b ln x: what candidates lately gained by how far their training went in ln x, x
    being the seconds of training. The `prior` counts as if it had been seen over `weight` in ln x.

    A drafter is published where it seems better than the one in use, and in part by luck. So the sum is not of what was
    published alone: every candidate counts, with all of its training since the drafter in use.
    """

    prior: float
    weight: float
    keeps: float
    """what was measured is multiplied by this for each look"""
    gain: float = 0.0
    """sum of what candidates gained over the drafters in use, in -ln(1 - agreement)"""
    log: float = 0.0
    """sum of how far training had gone in ln x beyond those"""

    @property
    def value(self) -> float:
        return max(0.0, (self.prior * self.weight + self.gain) / (self.weight + self.log))

    def judged(self, gain: float, log: float) -> None:
        """Note a candidate: its gain over the drafter in use, and how far training went beyond that one."""
        self.gain += gain
        self.log += log

    def fade(self) -> None:
        """What was measured counts for less from now on."""
        self.gain *= self.keeps
        self.log *= self.keeps

    def state(self) -> dict[str, float]:
        """Plain data, for a checkpoint."""
        return {"gain": self.gain, "log": self.log}

    def load_state(self, state: Mapping[str, float]) -> None:
        self.gain, self.log = state["gain"], state["log"]
