"""Section [reward]: reward functions with their weights, or an environment that gives the reward."""

from __future__ import annotations

import difflib
import re
from typing import Literal

from pydantic import Field, model_validator

from tlt.config.registry import REWARDS
from tlt.config.section import LONGEST, Section

_READ_BY = {"pattern": "format", "length_from": "length", "length_to": "length", "batched": ":"}
"""field that only one reward reads -> its name; `:` stands for functions of the user"""


class RewardTerm(Section):
    name: str = "reasoning_gym"
    """Name of the reward: `reasoning_gym`, `math`, `exact`, `format`, `length`, or your own `module:function`. Your
    function is called as f(prompt, answer) -> float and may be async. If it returns None, the term is left out. Further
    parameters are filled by name: response (the whole text), ground_truth, token_ids, length (in tokens),
    finish_reason, task, and columns of the data."""
    weight: float = Field(default=1.0, ge=-1e30, le=1e30)
    """Weight of this term. The reward is the sum of weight * score over the terms."""
    pattern: str = ""
    """Regular expression of the reward `format`. The score is 1 if it matches anywhere in the response, else 0."""
    length_from: int = Field(default=0, ge=0)
    """Response length in tokens up to which the score of the reward `length` is 0. For longer responses the score falls
    linearly, to -1 at `length_to`."""
    length_to: int = Field(default=0, ge=0)
    """Response length in tokens from which the score of the reward `length` is -1."""
    batched: bool = False
    """Call your function with lists (of prompts, answers, ...) for several responses. It returns a list of numbers."""
    if_fails: Literal["response", "term"] = "response"
    """Effect if your function raises an exception, or returns neither a number nor None: with `response` the response
    has no reward, with `term` only this term is left out of the sum."""

    @model_validator(mode="after")
    def _possible(self) -> RewardTerm:
        if self.name not in REWARDS and ":" not in self.name:
            near = difflib.get_close_matches(self.name, REWARDS, n=1)
            meant = f"did you mean {near[0]!r}" if near else f"give one of {', '.join(REWARDS)}"
            raise ValueError(f"unknown reward.name {self.name!r}: {meant}, or your own as 'module:function'")
        if self.name == "format" and not self.pattern:
            raise ValueError("the reward 'format' needs a pattern: write [[reward.terms]] with a name and a pattern")
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"the pattern {self.pattern!r} is not a regular expression: {error}") from None
        if self.name == "length" and self.length_to <= self.length_from:
            raise ValueError(
                "the reward 'length' needs length_to above length_from, in tokens: write [[reward.terms]] with a name "
                "and both"
            )
        kind = ":" if ":" in self.name else self.name
        for name, reader in _READ_BY.items():
            if reader != kind and getattr(self, name) != RewardTerm.model_fields[name].default:
                raise ValueError(f"the reward {self.name!r} does not use {name}: remove one of the two")
        return self


class RewardConfig(Section):
    name: str = "reasoning_gym"
    """Name of the only reward, as in `terms`."""
    terms: list[RewardTerm] = []
    """Several reward terms, whose weighted scores are summed, or one with further fields. Give `terms` or `name`."""
    environment: str | None = Field(default=None, pattern=r"^\w[\w.]*:\w+$")
    """Environment of episodes with several turns, your own `module:Class`. It replies to the model's turns and gives
    the reward, so that no `name` or `terms` are needed (docs/environments.md)."""
    turns: int | None = Field(default=None, gt=0)
    """Largest number of turns of the model in an episode (default: limited only by rollout.max_new_tokens)."""
    answer_marker: str = ""
    """Text before the answer, such as `Answer:`. The answer begins after the last occurrence of this text in the
    response. If a response lacks the text, the answer is empty. By default the answer begins with the response."""
    answer_end: str = ""
    """Text after the answer, such as `</answer>`. The answer ends before the first occurrence of this text after
    `answer_marker`. If the text does not occur there, the answer is empty. By default the answer ends with the
    response."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=LONGEST)
    """Timeout in seconds for a reward, or for a reply of the environment. If it is exceeded, the response has no
    reward."""
    memory_mb: int = Field(default=8192, ge=0, le=2**40)
    """Memory limit in MiB of a reward process together with the processes that it starts. 0 sets no limit."""
    folder: str = "."
    """Folder of the Python module with your reward function or environment. A relative path is looked up in the
    recipe's folder first, then in the working directory."""

    @model_validator(mode="after")
    def _one_or_several(self) -> RewardConfig:
        if self.terms and self.name != "reasoning_gym":
            raise ValueError("give either reward.name or [[reward.terms]], each with a name and a weight")
        if self.environment and (self.terms or self.name != "reasoning_gym"):
            raise ValueError("reward.environment gives the reward: remove reward.name and [[reward.terms]]")
        RewardTerm(name=self.name)  # refuses a name that cannot be used
        if self.turns and not self.environment:
            raise ValueError("reward.turns needs reward.environment: set it, or remove reward.turns")
        return self

    @property
    def all_terms(self) -> list[RewardTerm]:
        """Terms whose weighted scores are summed to the reward. Empty if an environment gives the reward."""
        return [] if self.environment else self.terms or [RewardTerm(name=self.name)]

    @property
    def named(self) -> str:
        """Text for display: the names of the reward terms joined by ` + `, or the name of the environment."""
        return self.environment or " + ".join(term.name for term in self.all_terms)
