"""What responses are worth."""

from __future__ import annotations

import difflib
import re
from typing import Literal

from pydantic import Field, model_validator

from tlt.config.registry import REWARDS
from tlt.config.section import LONGEST, Section


class RewardTerm(Section):
    name: str = "reasoning_gym"
    """`reasoning_gym`, `math`, `exact`, `format`, `length`, or your own `module:function`, called as f(prompt, answer)
    -> float, async or not; None: it does not apply. Parameters are filled by their names: prompt, answer, response (the
    whole text), ground_truth, token_ids, length (in tokens), finish_reason, task, and columns of the data"""
    weight: float = Field(default=1.0, ge=-1e30, le=1e30)
    """the reward is the sum of weight * score"""
    pattern: str = ""
    """format: 1 where this regular expression is found in the whole response, else 0"""
    length_from: int = Field(default=0, ge=0)
    """length: 0 up to so many tokens of the response, then falling ..."""
    length_to: int = Field(default=0, ge=0)
    """... to -1 at so many and above"""
    batched: bool = False
    """your own function takes lists (of prompts, answers, ...) and gives one of numbers"""
    if_fails: Literal["response", "term"] = "response"
    """where it raises or gives no number the response has no reward, or only this term does not apply"""

    @model_validator(mode="after")
    def _possible(self) -> RewardTerm:
        if self.name not in REWARDS and ":" not in self.name:
            near = difflib.get_close_matches(self.name, REWARDS, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(REWARDS)}"
            raise ValueError(f"unknown reward.name {self.name!r}: {meant}; your own is written 'module:function'")
        if (self.name == "format") != bool(self.pattern):
            raise ValueError("reward.name = 'format' goes with reward.pattern, a regular expression: give both")
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"reward.pattern {self.pattern!r} is not a regular expression: {error}") from None
        if self.name == "length" and self.length_to <= self.length_from:
            raise ValueError("reward.name = 'length' needs reward.length_to above reward.length_from, in tokens")
        return self


class RewardConfig(RewardTerm):
    terms: list[RewardTerm] = []
    """several rewards to be summed; give these or `name`"""
    answer_marker: str = ""
    """the answer is the text after the last of these in a response, letter by letter; empty: the whole response"""
    answer_end: str = ""
    """and before the next of these, such as `</answer>`; empty: up to the end"""
    timeout_seconds: float = Field(default=10.0, gt=0, le=LONGEST)
    """a response whose reward takes longer has none"""
    workers: int | None = Field(default=None, gt=0)
    """processes that may compute rewards at once; left out: half as many as there are cores. Those that only wait, for
    a network or a hanging program, are not counted"""
    batch_size: int = Field(default=16, gt=0)
    """responses that an async or a batched function is given at once"""
    memory_mb: int = Field(default=8192, ge=0, le=2**40)
    """bound of what a reward process may allocate, and of what it holds with all that it has started; 0: none"""
    folder: str = "."
    """where your module is: beside the recipe, or else in the working directory"""

    @model_validator(mode="after")
    def _one_or_several(self) -> RewardConfig:
        if self.terms and self.name != "reasoning_gym":
            raise ValueError("give either reward.name or [[reward.terms]], each with a name and a weight")
        return self

    @property
    def all_terms(self) -> list[RewardTerm]:
        return self.terms or [self]
